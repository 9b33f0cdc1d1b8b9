//! The session alone: inputs in, effects out.

use elasticdl_spec::{LeaseId, Shard, TaskId};

use super::*;

const MS: Duration = Duration::from_millis(1);

fn claim(shard: u32) -> Claim {
    Claim { task: TaskId::train(0, shard), lease: LeaseId { term: 1, n: u64::from(shard) + 1 } }
}

fn leased(n: u32) -> Leased {
    let shard = Shard { path: "a.csv".into(), first: 0, records: Some(9), offset: 0, fingerprint: 1 };
    Leased::new(claim(n), shard)
}

fn ask(pause: Duration) -> Effect {
    Effect::Ask { pause, ahead: false }
}

const ASK_AHEAD: Effect = Effect::Ask { pause: Duration::ZERO, ahead: true };
const LONG: Duration = Duration::from_secs(3600);

fn all_done() -> Outcome {
    Outcome::Done { records: 9, batches: 3, incarnations: vec![1, 1], scores: None }
}

/// A session and its clock.
#[derive(Default)]
struct Rig {
    session: Session,
    now: Duration,
}

impl Rig {
    fn step(&mut self, input: Input) -> Vec<Effect> {
        let mut effects = vec![];
        self.session.step(self.now, input, &mut effects);
        effects
    }

    /// A session with a task of this number, whose master gives none ahead.
    fn with_task(&mut self, n: u32) {
        self.step(Input::Wanted);
        let effects = self.step(Input::Leased(leased(n)));
        assert_eq!(effects[0], Effect::Start(leased(n)));
        if effects[1..] == [ASK_AHEAD] {
            assert_eq!(self.step(Input::Wait(LONG)), []);
        }
    }

    /// A session with one task begun and this many in hand, each of which takes a second.
    fn with_backlog(&mut self, count: u32) {
        self.with_task(0);
        self.with_task(1);
        for n in 0..2 {
            self.now += 1000 * MS;
            report(&self.done(n));
            self.step(Input::Reported { held: true });
        }
        self.session.ahead_not_before = self.now;
        assert_eq!(self.step(Input::Wanted), [ask(Duration::ZERO)]);
        let effects = self.step(Input::Leased(leased(2)));
        assert_eq!(effects, [Effect::Start(leased(2)), ASK_AHEAD]);
        for n in 3..3 + count {
            assert_eq!(self.session.asking, Some(Asking::Ahead));
            self.step(Input::Leased(leased(n)));
        }
    }

    fn applied(&mut self, n: u32, records: u64) -> Vec<Effect> {
        self.step(Input::Applied { claim: claim(n), records, loss_sum: records as f64 * 0.5 })
    }

    fn done(&mut self, n: u32) -> Vec<Effect> {
        self.step(Input::Ended(claim(n), all_done()))
    }
}

/// The only report among the effects.
fn report(effects: &[Effect]) -> &Report {
    match effects {
        [Effect::Report(report)] => report,
        other => panic!("one report expected: {other:?}"),
    }
}

#[test]
fn a_task_is_asked_for_when_one_is_wanted_and_not_twice() {
    let mut rig = Rig::default();
    assert_eq!(rig.step(Input::Tick), []);
    assert_eq!(rig.step(Input::Wanted), [ask(Duration::ZERO)]);
    assert_eq!(rig.step(Input::Tick), []);
    assert_eq!(rig.step(Input::Wait(30 * MS)), [ask(30 * MS)]);
    assert_eq!(rig.step(Input::Wait(Duration::ZERO)), [ask(5 * MS)], "never without a pause");
}

#[test]
fn one_task_is_leased_ahead_while_nothing_is_known_of_their_pace() {
    let mut rig = Rig::default();
    rig.with_task(0);
    rig.with_task(1);
    assert_eq!(rig.step(Input::Wanted), []);
    let effects = rig.done(0);
    assert_eq!(effects[0], ask(Duration::ZERO));
    assert_eq!(report(&effects[1..]).claim, claim(0));
}

#[test]
fn work_for_some_seconds_is_kept_in_hand() {
    let mut rig = Rig::default();
    rig.with_backlog(5);
    assert_eq!(rig.session.asking, None, "two, and four seconds of a second each");
    assert_eq!(rig.step(Input::Tick), []);
    assert_eq!(rig.step(Input::Wanted), [Effect::Start(leased(3))], "without asking anybody");
    rig.now += 1000 * MS;
    assert_eq!(rig.done(2)[0], ASK_AHEAD);
    assert_eq!(rig.step(Input::Wait(50 * MS)), []);
    rig.now += 49 * MS;
    assert_eq!(rig.step(Input::Tick), [], "it is not needed yet");
    rig.now += MS;
    assert_eq!(rig.step(Input::Tick), [ASK_AHEAD]);
}

#[test]
fn what_others_wait_for_goes_before_what_is_in_hand() {
    let mut rig = Rig::default();
    rig.with_backlog(3);
    let again = Leased { again: true, ..leased(8) };
    rig.step(Input::Leased(again.clone()));
    let mut evaluation = leased(9);
    evaluation.claim.task = TaskId::evaluate(0, 9);
    rig.step(Input::Leased(evaluation.clone()));
    assert_eq!(rig.step(Input::Wanted), [Effect::Start(again)]);
    assert_eq!(rig.step(Input::Wanted), [Effect::Start(evaluation)]);
    assert_eq!(rig.step(Input::Wanted), [Effect::Start(leased(3))]);
}

#[test]
fn leases_that_have_ended_are_let_go_of_begun_or_not() {
    let mut rig = Rig::default();
    rig.with_backlog(5);
    let ended = [2, 3, 4].map(|n| claim(n).lease).into();
    let effects = rig.step(Input::LeasesEnded(ended));
    assert_eq!(effects, [Effect::Drop(claim(2)), ASK_AHEAD]);
    assert_eq!(rig.session.leases(), [5, 6, 7].map(|n| claim(n).lease));
    assert_eq!(rig.step(Input::Wanted), [Effect::Start(leased(5))]);
}

#[test]
fn a_task_that_is_done_here_is_still_reported_though_its_lease_has_ended() {
    let mut rig = Rig::default();
    rig.with_task(0);
    rig.applied(0, 10);
    rig.done(0);
    assert_eq!(rig.step(Input::LeasesEnded([claim(0).lease].into())), []);
    assert_eq!(report(&rig.step(Input::Reported { held: true })).state, State::Ended(all_done()));
}

#[test]
fn what_was_not_begun_is_given_back_when_the_job_is_over() {
    let mut rig = Rig::default();
    rig.with_backlog(2);
    let effects = rig.step(Input::Finished);
    assert_eq!((report(&effects).claim, &report(&effects).state), (claim(3), &State::Returned));
    let effects = rig.step(Input::Reported { held: true });
    assert_eq!((report(&effects).claim, &report(&effects).state), (claim(4), &State::Returned));
    assert_eq!(rig.step(Input::Reported { held: true }), [], "the one in hand is finished first");
}

#[test]
fn a_session_that_goes_one_after_the_other_leases_nothing_ahead() {
    let mut rig = Rig { session: Session::one_after_the_other(), ..Rig::default() };
    rig.with_task(0);
    assert_eq!(rig.step(Input::Wanted), []);
    report(&rig.done(0));
    assert_eq!(rig.step(Input::Reported { held: true }), [ask(Duration::ZERO)]);
}

#[test]
fn the_leases_in_hand_are_those_whose_end_the_master_has_not_heard_of() {
    let mut rig = Rig::default();
    assert_eq!(rig.session.leases(), []);
    rig.with_task(0);
    rig.with_task(1);
    assert_eq!(rig.session.leases(), [claim(0).lease, claim(1).lease]);
    rig.done(0);
    assert_eq!(rig.session.leases().len(), 2, "its report is under way");
    rig.step(Input::Reported { held: true });
    assert_eq!(rig.session.leases(), [claim(1).lease]);
    rig.step(Input::Ended(claim(1), Outcome::Lost));
    assert_eq!(rig.session.leases(), []);
}

#[test]
fn the_beginning_of_a_task_is_told_at_once_and_once() {
    let mut rig = Rig::default();
    rig.with_task(0);
    report(&rig.applied(0, 10));
    rig.step(Input::Reported { held: true });
    let effects = rig.step(Input::Began(claim(0)));
    assert!(report(&effects).began, "though progress was told a moment ago");
    assert_eq!(report(&effects).state, State::Progress);
    assert_eq!(rig.step(Input::Began(claim(0))), []);
    rig.step(Input::Reported { held: true });
    assert_eq!(rig.step(Input::Began(claim(0))), []);
    assert!(!report(&rig.done(0)).began);
    assert_eq!(rig.step(Input::Began(claim(7))), [], "nobody's task");
}

#[test]
fn a_beginning_that_waits_for_another_report_is_told_with_the_next() {
    let mut rig = Rig::default();
    rig.with_task(0);
    assert!(!report(&rig.applied(0, 10)).began);
    assert_eq!(rig.step(Input::Began(claim(0))), [], "one report at a time");
    assert!(report(&rig.step(Input::Reported { held: true })).began);
}

#[test]
fn progress_is_gathered_and_reported_now_and_then() {
    let mut rig = Rig::default();
    rig.with_task(0);
    let first = rig.applied(0, 10);
    assert_eq!((report(&first).batches, report(&first).records), (1, 10));
    assert_eq!(rig.step(Input::Reported { held: true }), []);
    for _ in 0..3 {
        assert_eq!(rig.applied(0, 10), []);
    }
    rig.now = 199 * MS;
    assert_eq!(rig.step(Input::Tick), []);
    rig.now = 200 * MS;
    let second = rig.step(Input::Tick);
    let Report { batches, records, loss_sum, state, .. } = report(&second).clone();
    assert_eq!((batches, records, loss_sum, state), (3, 30, 15.0, State::Progress));
}

#[test]
fn what_happens_while_a_report_is_under_way_is_in_the_next_one() {
    let mut rig = Rig::default();
    rig.with_task(0);
    rig.applied(0, 10);
    assert_eq!(rig.applied(0, 20), []);
    assert_eq!(rig.done(0), [], "one report at a time");
    let effects = rig.step(Input::Reported { held: true });
    let last = report(&effects);
    assert_eq!((last.batches, last.records), (1, 20));
    assert_eq!(last.state, State::Ended(all_done()));
    assert_eq!(rig.step(Input::Reported { held: true }), []);
    rig.now = 1000 * MS;
    assert_eq!(rig.step(Input::Tick), [], "nothing is reported twice");
}

#[test]
fn a_lease_that_is_not_believed_is_dropped_at_once() {
    let mut rig = Rig::default();
    rig.with_task(0);
    rig.applied(0, 10);
    assert_eq!(rig.step(Input::Reported { held: false }), [Effect::Drop(claim(0))]);
    assert_eq!(rig.applied(0, 10), [], "a batch that landed late is nobody's news");
    assert_eq!(rig.done(0), []);
}

#[test]
fn a_lost_task_is_not_reported() {
    let mut rig = Rig::default();
    rig.with_task(0);
    assert_eq!(rig.step(Input::Ended(claim(0), Outcome::Lost)), []);
    assert_eq!(rig.step(Input::Wanted), [ask(Duration::ZERO)]);
}

#[test]
fn bad_records_are_told_with_the_next_report() {
    let mut rig = Rig::default();
    rig.with_task(0);
    let bad = Input::Bad { claim: claim(0), total: 3, examples: vec!["a.csv, line 7: no label".into()] };
    let effects = rig.step(bad);
    let told = report(&effects);
    assert_eq!((told.bad_records, told.bad_examples.len(), told.batches), (3, 1, 0));
}

#[test]
fn the_first_reason_for_a_tasks_end_counts_and_failures_slow_the_asking() {
    let mut rig = Rig::default();
    let failed = |error: &str| Outcome::Failed { error: error.into(), batch: 2, fatal: true };
    rig.with_task(0);
    let effects = rig.step(Input::Ended(claim(0), failed("nan")));
    assert_eq!(report(&effects).state, State::Ended(failed("nan")));
    assert_eq!(rig.step(Input::Ended(claim(0), failed("later"))), []);
    rig.step(Input::Reported { held: true });
    assert_eq!(rig.step(Input::Wanted), [ask(50 * MS)], "not as fast as it can");
    rig.step(Input::Leased(leased(1)));
    rig.applied(1, 10);
    rig.step(Input::Reported { held: true });
    assert_eq!(rig.step(Input::Wanted), [ask(Duration::ZERO)], "a batch done ends the row");
}

#[test]
fn a_finished_job_lets_the_worker_leave_after_its_last_report() {
    let mut rig = Rig::default();
    rig.with_task(0);
    rig.step(Input::Wanted);
    assert_eq!(rig.step(Input::Finished), [], "the task in hand is finished first");
    report(&rig.done(0));
    assert_eq!(rig.step(Input::Reported { held: true }), [Effect::EndStages]);
    assert_eq!(rig.step(Input::StagesEnded), [Effect::Leave]);
    assert_eq!(rig.step(Input::Tick), []);
}

#[test]
fn a_drain_gives_back_what_is_held_with_the_batches_that_still_landed() {
    let mut rig = Rig::default();
    rig.with_task(0);
    rig.with_task(1);
    assert_eq!(rig.step(Input::Drain), [Effect::EndStages]);
    assert_eq!(rig.step(Input::Drain), [], "once");
    report(&rig.applied(0, 10));
    rig.step(Input::Reported { held: true });
    rig.applied(0, 10);
    let effects = rig.step(Input::StagesEnded);
    let first = report(&effects);
    assert_eq!((first.claim, &first.state, first.batches), (claim(0), &State::Returned, 1));
    let effects = rig.step(Input::Reported { held: true });
    assert_eq!((report(&effects).claim, &report(&effects).state), (claim(1), &State::Returned));
    assert_eq!(rig.step(Input::Reported { held: true }), [Effect::Leave]);
}

#[test]
fn a_lease_that_crosses_the_drain_is_given_back() {
    let mut rig = Rig::default();
    rig.step(Input::Wanted);
    rig.step(Input::Drain);
    assert_eq!(rig.step(Input::StagesEnded), [], "the answer is waited for");
    let effects = rig.step(Input::Leased(leased(4)));
    assert_eq!((report(&effects).claim, &report(&effects).state), (claim(4), &State::Returned));
    assert_eq!(rig.step(Input::Reported { held: true }), [Effect::Leave]);
}
