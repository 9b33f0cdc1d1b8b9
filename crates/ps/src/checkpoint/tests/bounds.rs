//! Files of tables with a bound, whose rows go by numbers.

use elasticdl_spec::mix::mix2;

use super::cuts::{Written, opened, push, push_any, written_with};
use super::*;
use crate::table::Table;

/// Goal: ids that go, and those that go and come again under another number, are as they were at the last cut of a chain,
/// for whoever restores it and for whoever reads it.
#[test]
fn a_chain_knows_who_has_gone_and_who_came_back() {
    let mut partition = Partition::new(bounded_model(SGD), HERE, 1);
    let all: Vec<usize> = (0..120).collect();
    (0..2).for_each(|_| push(&mut partition, &all[..54], 1.0));
    let mut chain = vec![written_with(&mut partition, 1, None)];
    let ids = ids_of(HERE, 200);
    let held = |partition: &Partition| partition.tables()[1].ids().contains(&ids[0]);
    let mut seen = [held(&partition), false, false];
    for (checkpoint, rows) in [(2, &all[60..74]), (3, &all[74..88]), (4, &all[0..2])] {
        push(&mut partition, rows, 2.0);
        seen[1] |= !held(&partition);
        seen[2] |= seen[1] && held(&partition);
        chain.push(written_with(&mut partition, checkpoint, Some(checkpoint - 1)));
    }
    assert_eq!(seen, [true; 3], "the first id was there, went and came back");
    assert!(chain[1..].iter().all(|file| file.base.is_some()), "all add to the first");
    assert_eq!(bits(&opened(partition.model(), 2, &chain).unwrap()), bits(&partition));
    let bytes: Vec<&[u8]> = chain.iter().map(|file| &file.bytes[..]).collect();
    for files in 1..=chain.len() {
        let contents = decode_contents(&bytes[..files]).unwrap();
        let expected = opened(partition.model(), 2, &chain[..files]).unwrap();
        for (number, table) in expected.tables().iter().enumerate() {
            let (ids, weights) = &contents.tables[number];
            let mut held = table.ids();
            held.sort_unstable();
            assert_eq!(*ids, held);
            let mut rows = vec![0.0; weights.len()];
            table.read(ids, &mut rows);
            assert_eq!(*weights, rows);
        }
    }
    let counts = partition.tables()[1].counts().unwrap();
    assert!(counts.evicted > 10, "{counts:?}");
}

/// The rows of the next batch, drawn by its number: some are trained all the time, others now and then, so that the hand
/// finds rows of both kinds.
fn drawn(batch: usize) -> Vec<usize> {
    let draw = |i: usize| mix2(batch as u64, i as u64) as usize;
    (0..9).map(|i| if i < 5 { draw(i) % 40 } else { 40 + draw(i) % 100 }).collect()
}

/// A model whose tables are as is said of all of them.
fn model_of(said: &str) -> Arc<Model> {
    let said = serde_json::from_str(&format!(r#"{{ "*": {said} }}"#)).unwrap();
    Arc::new(Model::new("test", shape(), ADAM, SEED, PARTITIONS).with_tables(&said))
}

/// How many rows were trained since the hand came by.
fn trained_lately(table: &Table) -> usize {
    table.used().0.iter().map(|word| word.count_ones() as usize).sum()
}

/// The same partition at another server, which copies it.
fn moved(partition: &mut Partition) -> Partition {
    let mut new = Partition::new(Arc::clone(partition.model()), HERE, partition.incarnation() + 1);
    let copy = partition.begin_copy();
    while partition.unsent() > 0 {
        new.put_rows(&partition.copy_next(7, 1000)).unwrap();
    }
    new.take_over(partition.head(), &partition.tensor_floats()).unwrap();
    partition.end_copy(copy);
    new
}

/// Goal: the promise that the outcome is the same to the bit whatever dies. Whoever goes on from a chain of files, or from
/// a copy, has the same rows go as one that has never stopped.
#[test]
fn rows_go_as_if_nothing_had_died_or_moved() {
    for (said, uses) in [
        (r#"{ "memory_max": "12Ki" }"#, true),
        (r#"{ "memory_max": "12Ki", "admit_after": 2 }"#, true),
        (r#"{ "memory_max": "12Ki", "evict": "age" }"#, false),
    ] {
        let model = model_of(said);
        // The first one never stops. Of the others each goes on from where it was when a file was written.
        let mut all = vec![Partition::new(Arc::clone(&model), HERE, 1)];
        let mut batch = 0;
        let mut train = |batches: usize, all: &mut [Partition]| {
            for _ in 0..batches {
                all.iter_mut().for_each(|partition| push(partition, &drawn(batch), batch as f32 / 8.0));
                let expected = bits(&all[0]);
                assert!(all.iter().all(|one| bits(one) == expected), "{said} after batch {batch}");
                batch += 1;
            }
        };
        train(60, &mut all);
        let mut chain: Vec<Written> = Vec::new();
        let evicted = |of: &Partition| of.tables().iter().map(|t| t.counts().unwrap().evicted).min().unwrap();
        let (before, mut mixed) = (evicted(&all[0]), 0);
        for checkpoint in 1..=8 {
            let written = written_with(&mut all[0], checkpoint, (checkpoint > 1).then(|| checkpoint - 1));
            assert_eq!(written.base.is_some(), checkpoint > 1, "all add to the first");
            chain.push(written);
            let trained = all[0].tables().iter().map(|table| (trained_lately(table), table.len()));
            mixed += trained.filter(|(trained, all)| (1..*all).contains(trained)).count();
            all.push(opened(&model, 1 + checkpoint, &chain).unwrap());
            let copied = moved(&mut all[0]);
            all.push(copied);
            train(2, &mut all);
        }
        train(20, &mut all);
        assert!(mixed > 8 || !uses, "rows of both kinds in {mixed} of 16 tables");
        assert!(evicted(&all[0]) > before + 20, "{} rows have gone since {before}", evicted(&all[0]));
    }
}

/// Goal: files from before there were bits are read, and every row counts as trained then.
#[test]
fn files_of_the_third_format_are_read_without_bits() {
    let mut partition = Partition::new(model_of(r#"{ "memory_max": "12Ki" }"#), HERE, 1);
    (0..40).for_each(|batch| push(&mut partition, &drawn(batch), 1.0));
    let mut cut = Cut::begin(&mut partition, WHOLE);
    cut.head.format = 3;
    let (tables, tensors) = (cut.head.shape.tables.len(), cut.head.shape.tensors.len());
    cut.tensors.retain(|(name, _)| *name < 2 * tables + tensors);
    let mut encoder = Encoder::new(&mut cut, Vec::new()).unwrap();
    let mut rows = Rows::default();
    while let Some((table, _)) = cut.take_rows(&mut partition, &mut rows).unwrap() {
        encoder.put(table, &mut rows).unwrap();
    }
    let (bytes, sum) = encoder.finish().unwrap();
    let restored = decode(partition.model(), HERE, 2, &[(1, &bytes, sum)]).unwrap();
    let ids = |of: &Partition| of.tables().iter().map(Table::ids).collect::<Vec<_>>();
    assert_eq!(ids(&restored), ids(&partition));
    for (old, new) in partition.tables().iter().zip(restored.tables()) {
        assert_eq!(new.bounds(), old.bounds());
        assert_eq!(new.strangers(), old.strangers());
        assert!(trained_lately(old) < old.len() && trained_lately(new) == new.len());
    }
}

/// Goal: a job that has no table with a bound writes what it has always written.
#[test]
fn files_without_bounds_are_of_the_second_format_and_others_of_the_fourth() {
    let mut partition = Partition::new(model_with(SGD), HERE, 1);
    push(&mut partition, &[1, 2], 1.0);
    let plain = written_with(&mut partition, 1, None);
    let head = decode_contents(&[&plain.bytes]).unwrap().head;
    assert_eq!((head.format, head.columns().len(), head.bounds.len()), (2, 4, 0));
    assert!(!serde_json::to_string(&head).unwrap().contains("bounds"));

    let mut partition = Partition::new(bounded_model(SGD), HERE, 1);
    (0..2).for_each(|_| push(&mut partition, &[1, 2], 1.0));
    let bounded = written_with(&mut partition, 1, None);
    let head = decode_contents(&[&bounded.bytes]).unwrap().head;
    assert_eq!((head.format, head.columns().len(), head.rows), (4, 5, vec![2, 2]));
    assert_eq!((head.bounds[0].counts.refused, head.bounds[1].counts.refused), (2, 0));

    // Either is read by a job that says otherwise of its tables.
    let into_bounded = opened(&bounded_model(SGD), 2, std::slice::from_ref(&plain)).unwrap();
    assert_eq!(into_bounded.tables()[1].len(), 2);
    let into_plain = opened(&model_with(SGD), 2, &[bounded]).unwrap();
    assert_eq!(into_plain.tables()[0].len(), 2);
}

#[test]
fn a_reader_shows_the_rows_that_are_left_in_a_chain() {
    let dir = tempfile::tempdir().unwrap();
    let mut shape = shape();
    shape.tensors.truncate(1);
    let said = serde_json::from_str(r#"{ "*": { "memory_max": "16Ki" } }"#).unwrap();
    let model = Arc::new(Model::new("one", shape, SGD, SEED, 1).with_tables(&said));
    let mut partition = Partition::new(Arc::clone(&model), PartitionId(0), 1);
    let mut chain = Vec::new();
    for checkpoint in 1..=4u64 {
        let step = checkpoint as usize;
        push_any(&mut partition, if step == 1 { 0..500 } else { 500 + 40 * step..500 + 40 * step + 60 });
        let at = dir.path().join(checkpoint.to_string());
        fs::create_dir(&at).unwrap();
        let base = (checkpoint > 1).then(|| checkpoint - 1);
        let sum = write_now(&mut partition, Order { checkpoint, base, is_basis: true }, &at).unwrap();
        chain.push(Layer { checkpoint, dir: at, sum });
    }
    let reader = Reader::open(vec![chain]).unwrap();
    assert!(reader.heads()[0].base.is_some());
    let mut seen: BTreeMap<(String, u64), Vec<f32>> = BTreeMap::new();
    let visited = reader.visit(|piece| {
        if let Piece::Rows { table, ids, weights } = piece {
            for (id, row) in ids.iter().zip(weights.chunks(table.width())) {
                assert_eq!(
                    seen.insert((table.name.clone(), *id), row.to_vec()),
                    None,
                    "row {id} comes twice"
                );
            }
        }
        Ok::<_, Error>(())
    });
    visited.unwrap();
    let mut rows = 0;
    for (number, table) in partition.tables().iter().enumerate() {
        rows += table.len();
        for id in table.ids() {
            let mut row = vec![0.0; table.shape().width()];
            partition.read(number, &[id], &mut row);
            assert_eq!(seen[&(table.shape().name.clone(), id)], row);
        }
    }
    assert_eq!((seen.len(), reader.rows(0) + reader.rows(1)), (rows, rows as u64));
}
