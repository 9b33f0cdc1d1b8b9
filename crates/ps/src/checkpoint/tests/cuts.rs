//! Cuts are of one moment whatever happens while they are written, and chains of files hold what one whole file would.

use super::*;

fn task() -> TaskId {
    TaskId::train(1, 9)
}

/// Pushes the next batch of a task, which touches these rows.
pub(super) fn push(partition: &mut Partition, rows: &[usize], value: f32) {
    let all = ids_of(partition.id(), 200);
    let ids: Vec<u64> = rows.iter().map(|row| all[*row]).collect();
    let batch = partition.memory().marks.open().get(&task()).map_or(0, |open| open.mark);
    let header =
        PushHeader { task: task(), batch, lease: LeaseId { term: 1, n: 1 }, records: 3, factor: 1.0 };
    let (users, items) = (vec![value; rows.len() * 3], vec![-value; rows.len() * 2]);
    let tables =
        [RowGradients { ids: &ids, gradients: &users }, RowGradients { ids: &ids, gradients: &items }];
    let tensors: Vec<Vec<f32>> = partition.tensors().iter().map(|t| vec![value; t.values().len()]).collect();
    let tensors: Vec<&[f32]> = tensors.iter().map(Vec::as_slice).collect();
    let incarnation = partition.incarnation();
    let push = Push { header, incarnation, version: 0, tables: &tables, tensors: &tensors };
    assert_eq!(partition.push(&push).unwrap().mark, batch + 1);
}

/// Pulls rows, so that unknown ones are born.
fn pull(partition: &mut Partition, rows: &[usize]) {
    let all = ids_of(partition.id(), 200);
    let ids: Vec<u64> = rows.iter().map(|row| all[*row]).collect();
    partition.pull(0, &ids, &mut vec![0.0; 3 * ids.len()]).unwrap();
}

/// A file that is being written, and what it must hold.
struct Writing {
    cut: Cut,
    encoder: Encoder<Vec<u8>>,
    expected: String,
}

impl Writing {
    fn begin(partition: &mut Partition, order: Order) -> Self {
        let expected = bits(partition);
        let mut cut = Cut::begin(partition, order);
        let encoder = Encoder::new(&mut cut, Vec::new()).unwrap();
        Writing { cut, encoder, expected }
    }

    /// Takes a piece; `false`: there are no more.
    fn take(&mut self, partition: &mut Partition) -> bool {
        let mut rows = Rows::default();
        let Some((table, _)) = self.cut.take_rows(partition, &mut rows).unwrap() else { return false };
        self.encoder.put(table, &mut rows).unwrap();
        true
    }

    fn finish(mut self, partition: &mut Partition) -> Written {
        while self.take(partition) {}
        partition.end_cut(self.cut.head.checkpoint);
        let (bytes, sum) = self.encoder.finish().unwrap();
        Written {
            checkpoint: self.cut.head.checkpoint,
            base: self.cut.head.base,
            bytes,
            sum,
            expected: self.expected,
        }
    }
}

#[derive(Clone)]
pub(super) struct Written {
    checkpoint: u64,
    pub(super) base: Option<u64>,
    pub(super) bytes: Vec<u8>,
    sum: Sum,
    expected: String,
}

pub(super) fn opened(model: &Arc<Model>, incarnation: u64, chain: &[Written]) -> Result<Partition, Error> {
    let chain: Vec<_> = chain.iter().map(|file| (file.checkpoint, &file.bytes[..], file.sum)).collect();
    decode(model, HERE, incarnation, &chain)
}

/// A partition, and what a master would know of its files.
struct World {
    partition: Partition,
    next: u64,
    writing: Option<Writing>,
    /// Written and not committed.
    pending: Option<Written>,
    /// The committed chain.
    chain: Vec<Written>,
    adding: usize,
}

impl World {
    fn new(model: Arc<Model>) -> Self {
        let partition = Partition::new(model, HERE, 1);
        World { partition, next: 1, writing: None, pending: None, chain: Vec::new(), adding: 0 }
    }

    fn begin(&mut self) {
        if self.writing.is_none() {
            self.pending = None;
            let base = self.chain.last().map(|file| file.checkpoint).filter(|_| self.chain.len() < 5);
            let order = Order { checkpoint: self.next, base, is_basis: true };
            self.next += 1;
            self.writing = Some(Writing::begin(&mut self.partition, order));
        }
    }

    /// The file is written: with the chain that it adds to it holds what was there at the cut.
    fn finish(&mut self) {
        let Some(writing) = self.writing.take() else { return };
        let written = writing.finish(&mut self.partition);
        let chain = self.with(&written);
        let again = opened(self.partition.model(), 99, &chain).unwrap();
        assert_eq!(bits(&again), written.expected, "{} files", chain.len());
        self.adding += usize::from(chain.len() > 1);
        self.pending = Some(written);
    }

    fn with(&self, written: &Written) -> Vec<Written> {
        let mut chain = if written.base.is_some() { self.chain.clone() } else { Vec::new() };
        assert_eq!(chain.last().map(|last| last.checkpoint), written.base);
        chain.push(written.clone());
        chain
    }

    fn commit(&mut self) {
        if let Some(written) = self.pending.take() {
            self.chain = self.with(&written);
        }
    }

    /// The file cannot be written.
    fn fail(&mut self) {
        if let Some(writing) = self.writing.take() {
            self.partition.abandon_cut(writing.cut.head.checkpoint);
        }
    }

    /// The server dies; another one opens what is committed.
    fn reborn(&mut self, is_basis: bool) {
        let Some(last) = self.chain.last() else { return };
        (self.writing, self.pending) = (None, None);
        let incarnation = self.partition.incarnation() + 1;
        let (checkpoint, expected) = (last.checkpoint, last.expected.clone());
        self.partition = opened(&self.partition.model().clone(), incarnation, &self.chain).unwrap();
        assert_eq!(bits(&self.partition), expected);
        if is_basis {
            self.partition.is_as_in(checkpoint);
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Push(Vec<usize>, i8),
    Pull(Vec<usize>),
    Begin,
    Take,
    Finish,
    Fail,
    Commit,
    Reborn(bool),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let rows = prop_oneof![
        6 => proptest::collection::vec(0..200usize, 0..8),
        1 => proptest::collection::vec(0..200usize, 0..300),
    ];
    let op = prop_oneof![
        8 => (rows.clone(), any::<i8>()).prop_map(|(rows, value)| Op::Push(rows, value)),
        3 => rows.prop_map(Op::Pull),
        4 => Just(Op::Begin),
        8 => Just(Op::Take),
        3 => Just(Op::Finish),
        1 => Just(Op::Fail),
        3 => Just(Op::Commit),
        1 => any::<bool>().prop_map(Op::Reborn),
    ];
    proptest::collection::vec(op, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Goal: whatever is pushed, pulled and born while a file is written, whatever became of the checkpoints before it
    /// and in whichever life of the partition, a chain holds the partition as it was at the cut of its last file.
    #[test]
    fn any_chain_holds_what_there_was_at_the_cut(
        ops in ops(),
        optimizer in proptest::sample::select(&crate::optimizer::tests::ALL[..]),
        bounded in any::<bool>(),
    ) {
        let mut world = World::new(if bounded { bounded_model(optimizer) } else { model_with(optimizer) });
        for op in ops {
            match op {
                Op::Push(rows, value) => push(&mut world.partition, &rows, f32::from(value)),
                Op::Pull(rows) => pull(&mut world.partition, &rows),
                Op::Begin => world.begin(),
                Op::Take => {
                    if let Some(writing) = &mut world.writing {
                        writing.take(&mut world.partition);
                    }
                }
                Op::Finish => world.finish(),
                Op::Fail => world.fail(),
                Op::Commit => world.commit(),
                Op::Reborn(is_basis) => world.reborn(is_basis),
            }
        }
        world.begin();
        world.finish();
        world.commit();
        world.reborn(true);
    }
}

pub(super) fn written_with(partition: &mut Partition, checkpoint: u64, base: Option<u64>) -> Written {
    let order = Order { checkpoint, base, is_basis: true };
    Writing::begin(partition, order).finish(partition)
}

fn rows_in(written: &Written) -> Vec<u64> {
    decode_contents(&[&written.bytes]).unwrap().head.rows
}

#[test]
fn a_file_that_adds_holds_what_was_born_or_changed_since_its_base() {
    let mut partition = Partition::new(model_with(ADAM), HERE, 1);
    push(&mut partition, &(0..100).collect::<Vec<_>>(), 1.0);
    let whole = written_with(&mut partition, 1, None);
    assert_eq!((whole.base, rows_in(&whole)), (None, vec![100, 100]));

    push(&mut partition, &[3, 4, 4, 100], 1.0);
    pull(&mut partition, &[0, 101]);
    let added = written_with(&mut partition, 2, Some(1));
    assert_eq!((added.base, rows_in(&added)), (Some(1), vec![4, 3]), "3, 4, 100 and for one table 101");
    let head = decode_contents(&[&added.bytes]).unwrap().head;
    assert_eq!(head.partition_rows(), [102, 101]);

    // Nobody commits the second one: the third adds to the first and has what the second had.
    push(&mut partition, &[4, 5], 1.0);
    let third = written_with(&mut partition, 3, Some(1));
    assert_eq!((third.base, rows_in(&third)), (Some(1), vec![5, 4]));
    let again = opened(partition.model(), 2, &[whole, third.clone()]).unwrap();
    assert_eq!(bits(&again), bits(&partition));
    // The second one is forgotten: what changed since is not known any more.
    let fourth = written_with(&mut partition, 4, Some(2));
    assert_eq!((fourth.base, rows_in(&fourth)), (None, vec![102, 101]));
}

#[test]
fn a_file_is_whole_where_most_rows_have_changed() {
    let mut partition = Partition::new(model_with(SGD), HERE, 1);
    push(&mut partition, &(0..100).collect::<Vec<_>>(), 1.0);
    written_with(&mut partition, 1, None);
    push(&mut partition, &(0..50).collect::<Vec<_>>(), 1.0);
    assert_eq!(written_with(&mut partition, 2, Some(1)).base, Some(1));
    push(&mut partition, &[50], 1.0);
    assert_eq!(written_with(&mut partition, 3, Some(1)).base, None);
    assert_eq!(
        written_with(&mut partition, 4, Some(3)).base,
        Some(3),
        "a whole one is as good a base as any"
    );
}

#[test]
fn a_cut_that_was_lost_is_told() {
    let mut partition = trained(SGD);
    let mut first = Writing::begin(&mut partition, WHOLE);
    let mut rows = Rows::default();
    let mut other = Partition::new(model_with(SGD), HERE, 4);
    let error = first.cut.take_rows(&mut other, &mut rows).unwrap_err();
    assert!(matches!(error, Error::CutLost { partition: HERE }), "{error}");
    let second = Writing::begin(&mut partition, Order { checkpoint: 2, ..WHOLE });
    assert!(first.cut.take_rows(&mut partition, &mut rows).is_err(), "it was cut again");
    second.finish(&mut partition);
}

#[test]
fn a_chain_with_a_missing_or_foreign_file_is_refused() {
    let mut partition = Partition::new(model_with(SGD), HERE, 1);
    push(&mut partition, &(0..60).collect::<Vec<_>>(), 1.0);
    let mut chain = vec![written_with(&mut partition, 3, None)];
    for checkpoint in 4..6 {
        push(&mut partition, &[7, 60 + checkpoint as usize], 2.0);
        chain.push(written_with(&mut partition, checkpoint, Some(checkpoint - 1)));
    }
    let model = partition.model();
    assert_eq!(bits(&opened(model, 2, &chain).unwrap()), bits(&partition));
    let refused = |chain: &[&Written], expected: &str| {
        let chain: Vec<Written> = chain.iter().copied().cloned().collect();
        let error = opened(model, 2, &chain).unwrap_err().to_string();
        assert!(error.ends_with(expected), "{error}");
    };
    let [whole, second, third] = &chain[..] else { panic!("three files") };
    refused(&[whole, third], "it adds to checkpoint 4, where checkpoint 3 comes before it");
    refused(&[second], "it adds to checkpoint 3, where nothing comes before it");
    refused(&[whole, whole], "it adds to nothing, where checkpoint 3 comes before it");
    let renamed = Written { checkpoint: 9, ..second.clone() };
    refused(&[whole, &renamed], "it was written for 4, 9 is due");
    refused(&[], "it is in no checkpoint");
}

#[test]
fn files_of_the_first_format_are_read_and_added_to() {
    let mut partition = trained(SGD);
    let mut cut = Cut::begin(&mut partition, Order { checkpoint: 8, base: None, is_basis: true });
    (cut.head.format, cut.head.rows_of_all) = (1, Vec::new());
    let encoder = Encoder::new(&mut cut, Vec::new()).unwrap();
    let old = Writing { cut, encoder, expected: bits(&partition) }.finish(&mut partition);
    push(&mut partition, &[1], 1.0);
    let added = written_with(&mut partition, 9, Some(8));
    let again = opened(partition.model(), 5, &[old, added]).unwrap();
    assert_eq!(bits(&again), bits(&partition));
}

#[test]
fn a_reader_shows_the_last_state_of_every_row_of_a_chain() {
    let dir = tempfile::tempdir().unwrap();
    let mut shape = shape();
    shape.tensors.truncate(1);
    let model = Arc::new(Model::new("one", shape, SGD, SEED, 1));
    let mut partition = Partition::new(Arc::clone(&model), PartitionId(0), 1);
    let mut chain = Vec::new();
    for checkpoint in 1..=4u64 {
        let step = checkpoint as usize;
        push_any(&mut partition, if step == 1 { 0..150 } else { 10 * step..10 * step + 40 });
        let at = dir.path().join(checkpoint.to_string());
        fs::create_dir(&at).unwrap();
        let base = (checkpoint > 1).then(|| checkpoint - 1);
        let sum = write_now(&mut partition, Order { checkpoint, base, is_basis: true }, &at).unwrap();
        chain.push(Layer { checkpoint, dir: at, sum });
    }
    let reader = Reader::open(vec![chain.clone()]).unwrap();
    reader.verify().unwrap();
    assert_eq!((reader.rows(0), reader.heads()[0].rows[0]), (150, 40));
    let mut seen: BTreeMap<(String, u64), Vec<f32>> = BTreeMap::new();
    let mut tensors = 0;
    let visited = reader.visit(|piece| {
        match piece {
            Piece::Rows { table, ids, weights } => {
                for (id, row) in ids.iter().zip(weights.chunks(table.width())) {
                    assert_eq!(
                        seen.insert((table.name.clone(), *id), row.to_vec()),
                        None,
                        "row {id} comes twice"
                    );
                }
            }
            Piece::Tensor { values, .. } => {
                assert_eq!(values, partition.tensors()[0].values());
                tensors += 1;
            }
        }
        Ok::<_, Error>(())
    });
    visited.unwrap();
    assert_eq!((seen.len(), tensors), (300, 1));
    for (number, table) in partition.tables().iter().enumerate() {
        for id in 0..150 {
            let mut row = vec![0.0; table.shape().width()];
            partition.read(number, &[id], &mut row);
            assert_eq!(seen[&(table.shape().name.clone(), id)], row);
        }
    }
    chain.remove(1);
    let error = Reader::open(vec![chain]).unwrap_err().to_string();
    assert!(error.ends_with("it adds to checkpoint 2, where checkpoint 1 comes before it"), "{error}");
}

/// Pushes a batch to the rows of these ids in a partition that has all.
pub(super) fn push_any(partition: &mut Partition, ids: std::ops::Range<usize>) {
    let ids: Vec<u64> = ids.map(|id| id as u64).collect();
    let batch = partition.version();
    let header =
        PushHeader { task: task(), batch, lease: LeaseId { term: 1, n: 1 }, records: 3, factor: 1.0 };
    let (users, items) = (vec![0.5; ids.len() * 3], vec![0.25; ids.len() * 2]);
    let tables =
        [RowGradients { ids: &ids, gradients: &users }, RowGradients { ids: &ids, gradients: &items }];
    let tensor = vec![1.0; partition.tensors()[0].values().len()];
    let push = Push { header, incarnation: 1, version: 0, tables: &tables, tensors: &[&tensor] };
    partition.push(&push).unwrap();
}
