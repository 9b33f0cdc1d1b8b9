//! What another server says, harmed on the way: it is taken or refused, and nothing panics.

use std::sync::LazyLock;

use elasticdl_wire::frame::Frame;
use elasticdl_wire::ps::kind;

use super::*;
use crate::backups::also;
use crate::partition::copy::Copied;
use crate::requests::copy::{Handed, take_copied, take_handed, take_tensors};
use crate::requests::follow::{Followed, take_followed};
use crate::test_model::bounded_model;

/// It has tensors.
const PLACE: PartitionId = PartitionId(2);

/// Models without a bound and with one, and what servers of each say.
static SAID: LazyLock<[(Arc<Model>, Vec<Frame>); 2]> = LazyLock::new(|| {
    [model(), bounded_model(model().optimizer)].map(|model| (Arc::clone(&model), said(&model)))
});

/// A PUSH of one batch.
fn push(frame: &mut Frame, model: &Model, batch: u64, ids: &[u64]) {
    let lease = LeaseId { term: 1, n: 1 };
    let header = ps::PushHeader { task: TaskId::train(0, 0), batch, lease, records: 1, factor: 1.0 };
    ps::begin_push(frame, 1, header, 1);
    ps::put_part(frame, PLACE, 1);
    frame.put(0);
    for table in &model.shape.tables {
        ps::put_ids(frame, ids);
        frame.put_floats(&vec![0.5; table.width() * ids.len()]);
    }
    for tensor in model.tensors_of(PLACE).unwrap() {
        frame.put_floats(&vec![0.5; model.shape.tensors[*tensor].len()]);
    }
}

/// What a server says to one that copies a partition from it, backs it up, or takes it over.
fn said(model: &Arc<Model>) -> Vec<Frame> {
    let (mut frame, mut reply) = (Frame::default(), Frame::default());
    let ids = ids_of(PLACE, 12);
    let mut all = Vec::new();
    for request in [kind::COPY, kind::HAND_OVER, kind::FOLLOW] {
        let partitions = partitions_of(model);
        let mut requests = Requests::new(&partitions, Limits::default()).of(Who::Server(1));
        for batch in 0..2 {
            push(&mut frame, model, batch, &ids);
            Requests::new(&partitions, Limits::default()).answer(&frame, &mut reply).unwrap();
        }
        ps::copy(&mut frame, 1, (PLACE, 1), true, 1 << 13);
        requests.answer(&frame, &mut reply).unwrap();
        if request != kind::COPY {
            match request {
                kind::HAND_OVER => ps::hand_over(&mut frame, 1, &[(PLACE, 1)]),
                _ => ps::follow(&mut frame, 1, (PLACE, 1)),
            }
            requests.answer(&frame, &mut reply).unwrap();
        }
        all.push(std::mem::take(&mut reply));
        if request == kind::FOLLOW {
            ps::tensors(&mut frame, 1, PLACE, 0);
            requests.answer(&frame, &mut reply).unwrap();
            all.push(std::mem::take(&mut reply));
        }
    }
    push(&mut frame, model, 0, &ids);
    ps::did(&mut reply, 1, Some(&[frame]));
    all.push(reply);
    all
}

/// Does with an answer what a server does that has asked.
fn take(answer: &Frame, model: &Arc<Model>) -> bool {
    let mut partition = Partition::new(Arc::clone(model), PLACE, 1);
    let payload = answer.payload();
    match answer.kind() {
        kind::COPIED => {
            let mut copied = Copied::default();
            matches!(take_copied(payload, &mut copied), Ok(Some(_))) && partition.put_rows(&copied).is_ok()
        }
        kind::HANDED => match take_handed(payload, &[(PLACE, 1)]) {
            // The rows are not there.
            Ok(Handed::Yes(mut heads)) => {
                let floats = partition.tensor_floats();
                partition.take_over(heads.remove(0), &floats).is_err()
            }
            _ => false,
        },
        kind::FOLLOWED => match take_followed(payload, PLACE) {
            Ok(Followed::Yes(lacking)) => {
                let (head, rows) = *lacking;
                let floats = partition.tensor_floats();
                rows.iter().all(|some| partition.put_rows(some).is_ok())
                    && partition.take_over(head, &floats).is_ok()
            }
            _ => false,
        },
        kind::FLOATS => {
            let due = partition.tensor_floats_due();
            take_tensors(payload, due).is_ok_and(|floats| floats.len() == due)
        }
        kind::DID => {
            let Ok(Some(frames)) = ps::take_did(payload) else { return false };
            let shadow = Partitions::new(Arc::clone(model));
            shadow.open(partition);
            let mut requests = Requests::new(&shadow, Limits::default());
            let mut reply = Frame::default();
            let done = frames.iter().all(|frame| also(&shadow, &mut requests, frame, &mut reply).is_ok());
            assert!(shadow.gauges().is_ok(), "a partition was left half-changed");
            done
        }
        other => panic!("{other:#x} is no answer"),
    }
}

/// Goal: what is harmed below is what servers really say.
#[test]
fn what_servers_say_to_each_other_is_taken() {
    for (model, said) in &*SAID {
        let kinds: Vec<u32> = said.iter().map(Frame::kind).collect();
        assert_eq!(kinds, [kind::COPIED, kind::HANDED, kind::FOLLOWED, kind::FLOATS, kind::DID]);
        // A partition is followed when most of its rows were copied.
        for (answer, whole) in said.iter().zip([true, true, false, true, true]) {
            assert_eq!(take(answer, model), whole, "{:#x}", answer.kind());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn harmed_answers_of_servers_are_taken_or_refused(
        which in 0..5usize,
        bounded: bool,
        harms in proptest::collection::vec(
            (any::<proptest::sample::Index>(), prop_oneof![3 => 0..20u64, 2 => any::<u64>(), 1 => (0..64u32).prop_map(|bit| 1 << bit)]),
            0..4,
        ),
        cut in prop_oneof![3 => Just(None), 1 => any::<proptest::sample::Index>().prop_map(Some)],
    ) {
        let (model, said) = &SAID[usize::from(bounded)];
        let answer = &said[which];
        let mut words = answer.payload().rest().to_vec();
        for (place, word) in harms {
            let place = place.index(words.len());
            words[place] ^= word;
        }
        if let Some(cut) = cut {
            words.truncate(cut.index(words.len()));
        }
        let mut harmed = Frame::default();
        harmed.begin(answer.kind(), 1);
        harmed.put_all(&words);
        take(&harmed, model);
    }

    #[test]
    fn any_words_are_taken_for_an_answer_or_refused(
        kind in prop_oneof![Just(kind::COPIED), Just(kind::HANDED), Just(kind::FOLLOWED), Just(kind::FLOATS), Just(kind::DID)],
        words in proptest::collection::vec(prop_oneof![8 => 0..4u64, 1 => any::<u64>()], 0..60),
        bounded: bool,
    ) {
        let mut answer = Frame::default();
        answer.begin(kind, 1);
        answer.put_all(&words);
        take(&answer, &SAID[usize::from(bounded)].0);
    }
}
