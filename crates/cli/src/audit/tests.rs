use super::*;

const BATCH: u64 = 10;

/// A job of two epochs over shards of 40, 40 and 25 records in batches of ten, that is over.
fn job() -> Facts {
    let mut covered = Done::default();
    for task in (0..2).flat_map(|epoch| (0..3).map(move |shard| TaskId::train(epoch, shard))) {
        let records = if task.shard == 2 { 25 } else { 40 };
        covered.add(task, Finished { records, bad_records: 0, batches: records.div_ceil(BATCH) });
    }
    Facts {
        batch: BATCH,
        epochs: 2,
        shards: [(0, Some(40)), (1, Some(40)), (2, Some(25))].into(),
        complete: true,
        covered,
        ..Facts::default()
    }
}

/// The batches of a task of the job with their records.
fn batches(epoch: u32, shard: u32) -> Vec<(TaskId, u64, u64)> {
    let sizes: &[u64] = if shard == 2 { &[10, 10, 5] } else { &[10, 10, 10, 10] };
    sizes.iter().zip(0..).map(|(size, batch)| (TaskId::train(epoch, shard), batch, *size)).collect()
}

fn all() -> Vec<(TaskId, u64, u64)> {
    (0..2).flat_map(|epoch| (0..3).flat_map(move |shard| batches(epoch, shard))).collect()
}

/// A partition that has applied these batches.
fn applied(batches: &[(TaskId, u64, u64)]) -> Held {
    let mut held = Held::default();
    for (task, batch, records) in batches {
        let tally = held.tallies.entry(task.epoch).or_default();
        tally.records += records;
        tally.batches += 1;
        tally.digest = tally.digest.wrapping_add(digest(*task, *batch));
    }
    held
}

/// The audit of a job whose first partition is right.
fn check(facts: &Facts, right: &[(TaskId, u64, u64)], second: Held) -> Audit {
    audit(facts, &[(0, applied(right)), (1, second)].into()).unwrap()
}

fn figures(audit: &Audit) -> (bool, u64, u64, u64) {
    (audit.exact, audit.lost, audit.doubled, audit.set_aside)
}

#[test]
fn every_batch_applied_once_is_exact_in_whatever_order() {
    let mut backwards = all();
    backwards.reverse();
    let audit = check(&job(), &all(), applied(&backwards));
    assert_eq!(figures(&audit), (true, 0, 0, 0));
    assert_eq!(audit.lines.len(), 4);
    let line = Line { expected: 105, applied: 105, batches_agree: true, ..Line::default() };
    assert!(audit.lines.values().all(|l| *l == line), "{audit:?}");
}

#[test]
fn a_lost_batch_is_found_in_its_epoch_and_partition() {
    let mut batches = all();
    batches.retain(|(task, batch, _)| (*task, *batch) != (TaskId::train(1, 0), 3));
    let audit = check(&job(), &all(), applied(&batches));
    assert_eq!(figures(&audit), (false, 10, 0, 0));
    assert_eq!(audit.lines[&(1, 1)].lost, 10);
    assert!(audit.lines.iter().all(|(at, line)| *at == (1, 1) || line.batches_agree && line.lost == 0));
}

#[test]
fn a_doubled_batch_is_found_in_its_epoch_and_partition() {
    let mut batches = all();
    batches.push((TaskId::train(0, 2), 2, 5));
    let audit = check(&job(), &all(), applied(&batches));
    assert_eq!(figures(&audit), (false, 0, 5, 0));
    assert_eq!(audit.lines[&(0, 1)].doubled, 5);
}

#[test]
fn one_lost_and_another_doubled_is_not_exact_though_the_counts_agree() {
    let mut batches = all();
    batches[0] = batches[1];
    let audit = check(&job(), &all(), applied(&batches));
    assert_eq!(figures(&audit), (false, BATCH, BATCH, 0));
    let line = audit.lines[&(0, 1)];
    assert_eq!((line.expected, line.applied, line.batches_agree), (105, 105, false));
}

#[test]
fn an_epoch_that_nobody_asked_for_is_doubled() {
    let mut batches = all();
    batches.push((TaskId::train(2, 0), 0, 10));
    assert_eq!(figures(&check(&job(), &all(), applied(&batches))), (false, 0, 10, 0));
}

#[test]
fn malformed_records_are_set_aside_as_the_ledger_says_and_no_more() {
    let mut facts = job();
    // Three in shard 2, in both epochs: its last batch is short of them.
    facts.covered.bad_records = 6;
    let short = |lacking: u64| {
        let mut batches = all();
        batches.iter_mut().filter(|(t, b, _)| t.shard == 2 && *b == 2).for_each(|(_, _, n)| *n -= lacking);
        batches
    };
    let exact = check(&facts, &short(3), applied(&short(3)));
    assert_eq!(figures(&exact), (true, 0, 0, 6));
    assert_eq!((exact.lines[&(1, 0)].expected, exact.lines[&(1, 0)].set_aside), (102, 3));
    let more = check(&facts, &short(3), applied(&short(4)));
    assert_eq!((more.exact, more.lost, more.doubled), (false, 2, 0));
    let fewer = check(&facts, &short(3), applied(&short(2)));
    assert_eq!((fewer.exact, fewer.lost, fewer.doubled), (false, 0, 2));
    // A lost batch beside them is blamed on its own epoch.
    let mut lost = short(3);
    lost.retain(|(task, batch, _)| (*task, *batch) != (TaskId::train(1, 1), 0));
    let audit = check(&facts, &short(3), applied(&lost));
    assert_eq!(figures(&audit), (false, 10, 0, 6));
    assert_eq!((audit.lines[&(1, 1)].lost, audit.lines[&(1, 1)].set_aside), (10, 3));
}

#[test]
fn a_quarantined_batch_moves_the_mark_and_teaches_nothing() {
    let mut facts = job();
    facts.covered.bad_records = 10;
    let mut batches = all();
    batches.iter_mut().filter(|(t, b, _)| (*t, *b) == (TaskId::train(0, 1), 2)).for_each(|b| b.2 = 0);
    let audit = check(&facts, &batches, applied(&batches));
    assert_eq!(figures(&audit), (true, 0, 0, 10));
    assert_eq!((audit.lines[&(0, 0)].expected, audit.lines[&(0, 0)].applied), (95, 95));
    let applied_all = check(&facts, &batches, applied(&all()));
    assert_eq!((applied_all.exact, applied_all.doubled), (false, 10), "it was applied");
}

/// The job in its first epoch: shard 0 is covered, shards 1 and 2 are open.
fn running() -> Facts {
    let mut covered = Done::default();
    covered.add(TaskId::train(0, 0), Finished { records: 40, bad_records: 0, batches: 4 });
    Facts { complete: false, covered, ..job() }
}

/// What a partition of it holds with marks at `first` in shard 1 and at `second` in shard 2.
fn open(first: usize, second: usize) -> Held {
    let mut all = batches(0, 0);
    all.extend(&batches(0, 1)[..first]);
    all.extend(&batches(0, 2)[..second]);
    let marks = [(TaskId::train(0, 1), first as u64), (TaskId::train(0, 2), second as u64)].into();
    Held { marks, ..applied(&all) }
}

#[test]
fn a_running_job_owes_covered_tasks_wholly_and_open_ones_up_to_each_files_mark() {
    let facts = running();
    let exact = audit(&facts, &[(0, open(2, 3)), (1, open(1, 0))].into()).unwrap();
    assert_eq!(figures(&exact), (true, 0, 0, 0));
    assert_eq!((exact.lines[&(0, 0)].applied, exact.lines[&(0, 1)].applied), (85, 50));
    let mut wrong = open(2, 0);
    *wrong.marks.get_mut(&TaskId::train(0, 1)).unwrap() = 3;
    let wrong = audit(&facts, &[(0, wrong)].into()).unwrap();
    assert_eq!(figures(&wrong), (false, 10, 0, 0), "a mark without its batch");
    let none = Held { marks: BTreeMap::new(), ..open(0, 1) };
    assert_eq!(figures(&audit(&facts, &[(0, none)].into()).unwrap()), (false, 0, 10, 0), "and the reverse");
    let mut uncovered = open(1, 1);
    uncovered.tallies.get_mut(&0).unwrap().records -= 40;
    assert_eq!(figures(&audit(&facts, &[(0, uncovered)].into()).unwrap()), (false, 40, 0, 0));
}

#[test]
fn a_mark_of_a_covered_task_is_not_owed_again() {
    let mut held = open(1, 1);
    held.marks.insert(TaskId::train(0, 0), 4);
    assert!(audit(&running(), &[(0, held)].into()).unwrap().exact);
}

#[test]
fn records_of_open_tasks_that_are_set_aside_are_not_known_yet() {
    let mut held = open(4, 3);
    held.tallies.get_mut(&0).unwrap().records -= 2;
    let strict = audit(&running(), &[(0, held.clone())].into()).unwrap();
    assert_eq!(figures(&strict), (false, 2, 0, 0), "a job that sets none aside has none");
    let facts = Facts { sets_aside: true, ..running() };
    assert_eq!(figures(&audit(&facts, &[(0, held)].into()).unwrap()), (true, 0, 0, 2));
}

#[test]
fn shards_that_only_reading_measures_are_known_once_a_task_has_read_them() {
    let mut facts = job();
    facts.shards.insert(2, None);
    assert_eq!(audit(&facts, &BTreeMap::new()), Err(Unknown(2)));
    facts.recent.insert(TaskId::train(1, 2), Finished { records: 25, bad_records: 0, batches: 3 });
    assert!(check(&facts, &all(), applied(&all())).exact);
}

#[test]
fn what_was_replayed_is_told_where_it_was_lost() {
    let mut facts = job();
    facts.replayed_in = [(1, [(1, 40)].into())].into();
    let audit = check(&facts, &all(), applied(&all()));
    let replayed: Vec<_> = audit.lines.iter().map(|(at, line)| (*at, line.replayed)).collect();
    assert_eq!(replayed, [((0, 0), 0), ((0, 1), 0), ((1, 0), 0), ((1, 1), 40)]);
    assert!(audit.exact, "applied again is not applied twice");
}
