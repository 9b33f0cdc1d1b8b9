mod harmed;

use std::sync::Arc;

use elasticdl_spec::{LeaseId, TaskId};
use proptest::prelude::*;

use super::*;
use crate::gate::Policy;
use crate::test_model::{ids_of, model, rounded_model};

fn partitions() -> Partitions {
    partitions_of(&model())
}

fn partitions_of(model: &Arc<Model>) -> Partitions {
    let partitions = Partitions::new(Arc::clone(model));
    (0..3).for_each(|id| partitions.open(Partition::new(Arc::clone(model), PartitionId(id), 1)));
    partitions
}

/// Goal: rows come rounded as their table says, gradients are read as they were sent, and the row itself keeps
/// all its bits.
#[test]
fn rows_and_gradients_travel_in_the_precision_of_their_table() {
    let partitions = partitions_of(&rounded_model());
    let mut requests = Requests::new(&partitions, Limits::default());
    let (mut frame, mut reply) = (Frame::default(), Frame::default());
    let place = PartitionId(1);
    let ids = ids_of(place, 3);
    let lease = LeaseId { term: 1, n: 1 };
    let header = ps::PushHeader { task: TaskId::train(0, 0), batch: 0, lease, records: 1, factor: 1.0 };
    ps::begin_push(&mut frame, 1, header, 1);
    ps::put_part(&mut frame, place, 1);
    frame.put(0);
    for (precision, width) in [(Precision::F16, 3), (Precision::Bf16, 2)] {
        ps::put_ids(&mut frame, &ids);
        // One and a bit that only f16 keeps.
        floats::put(&mut frame, precision, &vec![-1.001_953_1; 3 * width]);
    }
    for tensor in model().tensors_of(place).unwrap() {
        frame.put_floats(&vec![0.0; model().shape.tensors[*tensor].len()]);
    }
    requests.answer(&frame, &mut reply).unwrap();
    assert_eq!(ps::take_answers(reply.payload()).unwrap()[0].status, Status::Ok);

    ps::begin_pull(&mut frame, 2, PullMode { births: true, tensors: false }, 1);
    ps::put_part(&mut frame, place, 1);
    (0..2).for_each(|_| ps::put_ids(&mut frame, &ids));
    requests.answer(&frame, &mut reply).unwrap();
    let mut payload = reply.payload();
    payload.take_all(4).unwrap();
    let moved = [1.001_953_1, 1.0];
    for (table, precision) in [Precision::F16, Precision::Bf16].into_iter().enumerate() {
        let width = model().shape.tables[table].width();
        let (mut pulled, mut held) = (vec![0.0; 3 * width], vec![0.0; 3 * width]);
        floats::take(&mut payload, precision, &mut pulled).unwrap();
        partitions.with(place, |p| p.read(table, &ids, &mut held)).unwrap();
        // The first weight of a row is born zero.
        assert_eq!((held[0], pulled[0]), (moved[table], moved[table]), "{precision:?}");
        let near = pulled.iter().zip(&held).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0);
        assert!(near && pulled != held, "{precision:?}: {pulled:?} for {held:?}");
    }
    payload.end().unwrap();
}

/// Goal: gradients that travel in half the room take no more than a frame may when they are unpacked.
#[test]
fn gradients_that_are_too_long_unpacked_are_refused() {
    let partitions = partitions_of(&rounded_model());
    let (mut frame, mut reply) = (Frame::default(), Frame::default());
    let (place, model) = (PartitionId(1), partitions.model());
    let lease = LeaseId { term: 1, n: 1 };
    let header = ps::PushHeader { task: TaskId::train(0, 0), batch: 0, lease, records: 1, factor: 1.0 };
    ps::begin_push(&mut frame, 1, header, 1);
    ps::put_part(&mut frame, place, 1);
    frame.put(0);
    for table in &model.shape.tables {
        ps::put_ids(&mut frame, &ids_of(place, 64));
        floats::put(&mut frame, Precision::F16, &vec![0.5; 64 * table.width()]);
    }
    for tensor in model.tensors_of(place).unwrap() {
        frame.put_floats(&vec![0.5; model.shape.tensors[*tensor].len()]);
    }
    // Three and two weights of 64 rows are 160 words of f32.
    let refused = Requests::new(&partitions, Limits { words_max: 159 }).answer(&frame, &mut reply);
    let text = "malformed frame: gradients of 1280 bytes, 1272 is the limit";
    assert_eq!(refused.unwrap_err().chain(), text);
    assert_eq!(partitions.with(place, |p| p.version()), Some(0));
    Requests::new(&partitions, Limits { words_max: 160 }).answer(&frame, &mut reply).unwrap();
    assert_eq!(partitions.with(place, |p| p.version()), Some(1));
}

/// A pull of some rows of one partition, and of this one of another.
fn pull_of_two(frame: &mut Frame, many: &[u64], (place, id): (PartitionId, u64)) {
    ps::begin_pull(frame, 3, PullMode { births: true, tensors: false }, 2);
    for (place, ids) in [(PartitionId(1), many), (place, &[id])] {
        ps::put_part(frame, place, 1);
        (0..2).for_each(|_| ps::put_ids(frame, ids));
    }
}

/// Whether an answer to such a pull has all rows as the partitions hold them.
fn check_rows_of_two(got: &Frame, partitions: &Partitions, many: &[u64], other: (PartitionId, u64)) {
    let model = partitions.model();
    let mut payload = got.payload();
    payload.take().unwrap();
    for (place, ids) in [(PartitionId(1), many), (other.0, &[other.1])] {
        assert_eq!(payload.take_all(3).unwrap(), [u64::from(place.0), Status::Ok.word(), 0]);
        for (table, spec) in model.tables().iter().enumerate() {
            let mut held = vec![0.0; ids.len() * model.shape.tables[table].width()];
            partitions.with(place, |p| p.read(table, ids, &mut held)).unwrap();
            let mut expected = Frame::default();
            expected.begin(kind::PULLED, 3);
            floats::put(&mut expected, spec.wire, &held);
            let words = expected.payload().rest();
            assert!(payload.take_all(words.len()).unwrap() == words, "{table} of {place}");
        }
    }
    payload.end().unwrap();
}

/// Goal: a long answer goes out while the rest of it is made, with its partition free for others, and comes as the same
/// one, also where pieces of it end in the middle of a table.
#[test]
fn a_long_answer_is_sent_in_parts_and_comes_whole() {
    for model in [model(), rounded_model()] {
        let partitions = partitions_of(&model);
        let mut requests = Requests::new(&partitions, Limits::default());
        let (mut frame, mut reply) = (Frame::default(), Frame::default());
        let (many, other) = (ids_of(PartitionId(1), 60_000), (PartitionId(2), ids_of(PartitionId(2), 1)[0]));
        pull_of_two(&mut frame, &many, other);
        let (mut bytes, mut parts) = (Vec::new(), 0);
        let mut send = |part: &mut Frame| {
            parts += 1;
            partitions.with(PartitionId(1), |partition| partition.version()).expect("nobody has it now");
            part.write_part(&mut bytes)
        };
        requests.answer_in_parts(&frame, &mut reply, &mut send).unwrap();
        reply.write(&mut bytes).unwrap();
        assert!(parts > 3, "{parts}");
        let mut got = Frame::default();
        assert!(got.read(&mut &bytes[..], Limits::default()).unwrap());
        assert_eq!(got.kind(), kind::PULLED);
        check_rows_of_two(&got, &partitions, &many, other);
    }
}

/// Goal: where a batch is computed from one version, all rows of a partition are copied at one moment, with no more room for
/// what is rounded than else.
#[test]
fn a_version_is_copied_at_one_moment() {
    for model in [model(), rounded_model()] {
        let mut model = Arc::unwrap_or_clone(model);
        model.policy = Some(Policy::Bounded(1));
        let partitions = partitions_of(&Arc::new(model));
        let mut requests = Requests::new(&partitions, Limits::default());
        let (mut frame, mut reply, mut parts) = (Frame::default(), Frame::default(), 0);
        let (many, other) = (ids_of(PartitionId(1), 60_001), (PartitionId(2), ids_of(PartitionId(2), 1)[0]));
        pull_of_two(&mut frame, &many, other);
        let mut send = |_: &mut Frame| {
            parts += 1;
            Ok(())
        };
        requests.answer_in_parts(&frame, &mut reply, &mut send).unwrap();
        assert_eq!(parts, 1);
        check_rows_of_two(&reply, &partitions, &many, other);
        assert!(requests.rounded.iter().all(|room| 4 * room.capacity() <= 2 * COPIED_BYTES));
    }
}

/// Goal: rows of two lives do not come as those of one.
#[test]
fn a_partition_that_leaves_in_the_middle_of_an_answer_ends_it() {
    let partitions = partitions();
    let mut requests = Requests::new(&partitions, Limits::default());
    let (mut frame, mut reply) = (Frame::default(), Frame::default());
    pull_of_two(&mut frame, &ids_of(PartitionId(1), 60_000), (PartitionId(2), 0));
    for again in [false, true] {
        let mut send = |_: &mut Frame| {
            partitions.take(PartitionId(1));
            if again {
                partitions.open(Partition::new(model(), PartitionId(1), 2));
            }
            Ok(())
        };
        partitions.open(Partition::new(model(), PartitionId(1), 1));
        let failed = requests.answer_in_parts(&frame, &mut reply, &mut send);
        assert!(matches!(failed, Err(Error::Left { partition: PartitionId(1) })), "{failed:?}");
    }
}

/// Goal: who asked hears what is wrong, although a part of the answer was on its way already.
#[test]
fn an_answer_that_fails_in_the_middle_is_a_refusal() {
    let partitions = partitions();
    let mut requests = Requests::new(&partitions, Limits::default());
    let (mut frame, mut reply, mut bytes) = (Frame::default(), Frame::default(), Vec::new());
    let many = ids_of(PartitionId(1), 9000);
    pull_of_two(&mut frame, &many, (PartitionId(2), many[0]));
    let failed = requests.answer_in_parts(&frame, &mut reply, &mut |part| part.write_part(&mut bytes));
    assert!(failed.is_err() && !bytes.is_empty(), "{failed:?}");
    ps::refused(&mut reply, 3, "it lives elsewhere");
    reply.write(&mut bytes).unwrap();
    let mut got = Frame::default();
    assert!(got.read(&mut &bytes[..], Limits::default()).unwrap());
    assert_eq!(got.kind(), kind::REFUSED);
}

/// A frame with an empty batch for these partitions, and how it begins.
fn batch(frame: &mut Frame, begin: fn(&mut Frame, u64, ps::PushHeader, usize), parts: &[u32]) {
    let lease = LeaseId { term: 1, n: 1 };
    let header = ps::PushHeader { task: TaskId::train(0, 0), batch: 0, lease, records: 0, factor: 1.0 };
    begin(frame, 7, header, parts.len());
    for part in parts {
        ps::put_part(frame, PartitionId(*part), 1);
        frame.put_all(&[0, 0, 0]);
        for tensor in model().tensors_of(PartitionId(*part)).unwrap() {
            frame.put_floats(&vec![0.0; model().shape.tensors[*tensor].len()]);
        }
    }
}

/// Goal: a push that waits for one partition holds up nobody who wants another one.
#[test]
fn no_other_partition_is_locked_while_a_push_waits_for_one() {
    let partitions = partitions();
    let (mut frame, mut reply) = (Frame::default(), Frame::default());
    batch(&mut frame, ps::begin_push, &[0, 2]);
    std::thread::scope(|scope| {
        let (held, holding) = std::sync::mpsc::channel();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let partitions = &partitions;
        scope.spawn(move || {
            partitions.with(PartitionId(2), |_| {
                held.send(()).unwrap();
                // Until the test lets go, or has failed.
                released.recv().ok();
            })
        });
        holding.recv().unwrap();
        scope.spawn(move || Requests::new(partitions, Limits::default()).answer(&frame, &mut reply).unwrap());
        let (seen, sight) = std::sync::mpsc::channel();
        scope.spawn(move || {
            while partitions.with(PartitionId(0), |p| p.version()) != Some(1) {
                std::thread::yield_now();
            }
            seen.send(()).ok();
        });
        let free = sight.recv_timeout(std::time::Duration::from_secs(60));
        drop(release);
        free.expect("the first partition has the batch, and is free, while the other one is waited for");
    });
    assert_eq!(partitions.with(PartitionId(2), |p| p.version()), Some(1));
}

#[test]
fn buffers_are_used_again_for_the_next_request() {
    let items = vec![1u64; 100];
    let place = items.as_ptr() as usize;
    let again: Vec<i64> = emptied(items);
    assert_eq!((again.len(), again.capacity(), again.as_ptr() as usize), (0, 100, place));
}

#[test]
fn a_batch_is_staged_and_committed_by_frames() {
    let partitions = partitions();
    let mut requests = Requests::new(&partitions, Limits::default());
    let (mut frame, mut reply) = (Frame::default(), Frame::default());
    let mut answers = |frame: &Frame| {
        requests.answer(frame, &mut reply).unwrap();
        ps::expect(&reply, kind::PUSHED, 7).unwrap();
        let answers = ps::take_answers(reply.payload()).unwrap();
        answers.into_iter().map(|a| (a.partition.0, a.status, a.mark)).collect::<Vec<_>>()
    };
    batch(&mut frame, ps::begin_stage, &[0, 2]);
    assert_eq!(answers(&frame), [(0, Status::Ok, 0), (2, Status::Ok, 0)]);
    let lease = LeaseId { term: 1, n: 1 };
    let commit = ps::Commit { task: TaskId::train(0, 0), batch: 0, lease };
    let parts = [0, 1, 2, 3].map(|p| (PartitionId(p), 1));
    ps::commit(&mut frame, 7, commit, &parts);
    assert_eq!(
        answers(&frame),
        [(0, Status::Ok, 1), (1, Status::NotStaged, 0), (2, Status::Ok, 1), (3, Status::NotHere, 0)]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Goal: whatever a frame holds, it is answered or refused: no panic, no half-changed partition.
    #[test]
    fn any_words_are_answered_or_refused(
        request in prop_oneof![
            Just(kind::PULL), Just(kind::PUSH), Just(kind::FENCE), Just(kind::STAGE), Just(kind::COMMIT),
            Just(kind::COPY), Just(kind::HAND_OVER), Just(kind::FOLLOW), Just(kind::NEXT), Just(kind::GATE),
            Just(kind::STEP), Just(kind::TENSORS), any::<u32>(),
        ],
        words in proptest::collection::vec(prop_oneof![8 => 0..4u64, 1 => any::<u64>()], 0..60),
        rounded: bool,
        policy in prop_oneof![
            Just(Some(Policy::Rounds(2))),Just(None), Just(Some(Policy::Bounded(1))), Just(Some(Policy::Steps(2)))],
    ) {
        let mut model = (*if rounded { rounded_model() } else { model() }).clone();
        model.policy = policy;
        let partitions = partitions_of(&Arc::new(model));
        let mut requests = Requests::new(&partitions, Limits { words_max: 1 << 12 }).of(Who::Server(1));
        let (mut frame, mut reply) = (Frame::default(), Frame::default());
        frame.begin(request, 1);
        frame.put_all(&words);
        if requests.answer(&frame, &mut reply).is_ok() {
            prop_assert_eq!(reply.request(), 1);
        }
        prop_assert!(partitions.gauges().is_ok(), "a partition was left half-changed");
        prop_assert!(reply.bytes() <= 8 * ((1 << 12) + 2));
    }
}
