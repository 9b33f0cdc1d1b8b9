//! How many workers a job asks for when nobody has said how many, and how many of each kind a job has that is resumed.

use elasticdl_wire::control::copied_reply;

use super::*;

const AUTO: [(&str, &str); 2] = [("workers.min", "1"), ("workers.max", "8")];
/// More tasks than any of these tests does.
const SHARDS: u64 = 2000;
/// How often workers tell how far they are.
const NEWS: Duration = Duration::from_millis(200);

/// Speeds of so many workers in records a second.
type Curve = fn(u32) -> u64;

/// Two processors: a third worker adds next to nothing.
fn two_cores(workers: u32) -> u64 {
    [0, 10_000, 18_500, 19_000, 18_700, 18_400, 18_000, 17_600, 17_200][workers as usize]
}

fn all_of_use(workers: u32) -> u64 {
    10_000 * u64::from(workers)
}

impl World {
    /// Everybody works for so many seconds, as fast as `curve` says. Returns the numbers of workers that were
    /// wanted on the way.
    fn work(&mut self, seconds: u64, curve: Curve) -> Vec<u32> {
        let mut wanted = vec![self.job.fleet.workers_wanted()];
        let mut hands: BTreeMap<u32, Leased> = BTreeMap::new();
        let end = self.now + Duration::from_secs(seconds);
        while self.now < end {
            self.tick(NEWS.as_millis() as u64);
            let workers = self.workers();
            let each = curve(workers.len() as u32) * NEWS.as_millis() as u64 / 1000 / workers.len() as u64;
            for id in workers {
                // Told to leave by what another one has just told.
                if !self.running.contains_key(&(Role::Worker as i32, id)) {
                    continue;
                }
                let leased = match hands.get(&id) {
                    Some(leased) => leased.clone(),
                    None => self.lease(id).expect("there are tasks for everybody"),
                };
                self.tell(id, &leased, each);
                hands.insert(id, leased);
                wanted.push(self.job.fleet.workers_wanted());
            }
        }
        wanted.dedup();
        wanted
    }

    fn workers(&self) -> Vec<u32> {
        self.running.keys().filter(|(role, _)| *role == Role::Worker as i32).map(|(_, id)| *id).collect()
    }

    fn tell(&mut self, worker: u32, leased: &Leased, records: u64) {
        let caller = self.caller(Role::Worker, worker);
        let report = ReportRequest {
            task: leased.task.clone(),
            term: leased.term,
            lease: leased.lease,
            batches: 1,
            records,
            ..ReportRequest::default()
        };
        let answer = self.ask(|t| Event::Reported(t, caller, Box::new(report)));
        assert_eq!(answer, Some(Answer::Report(true)));
    }

    fn scaled(&self) -> Vec<(u64, u64, bool, &str)> {
        let number = |facts: &Map<String, Value>, name: &str| facts[name].as_u64().unwrap();
        let scaled = self.emitted.iter().filter(|(event, _)| *event == "scaled");
        scaled
            .map(|(_, facts)| {
                let (automatic, reason) = (facts["automatic"].as_bool(), facts["reason"].as_str());
                (number(facts, "from"), number(facts, "to"), automatic.unwrap(), reason.unwrap())
            })
            .collect()
    }

    fn why(&self) -> Option<String> {
        self.job.status(self.now).workers_why
    }
}

#[test]
fn an_automatic_job_grows_while_that_pays_and_gives_back_what_adds_nothing() {
    let mut world = World::training(&AUTO, SHARDS);
    assert_eq!(world.why().unwrap(), "measures how fast they are");
    assert_eq!(world.work(60, two_cores), [2, 4, 2, 1, 2]);
    assert_eq!(world.workers(), [0, 4], "the newest go first, and who comes back has a number of its own");
    assert_eq!(world.why().unwrap(), "more would add less than 5 %");
    let (first, last) = (world.scaled()[0], *world.scaled().last().unwrap());
    assert_eq!(first, (2, 4, true, "tries whether that is better than 2"));
    assert_eq!(last, (1, 2, true, "more would add less than 5 %"));
    assert_eq!(world.book.workers_wanted, Some(2));
}

#[test]
fn an_automatic_job_never_asks_for_more_than_max_nor_fewer_than_min() {
    let mut world = World::training(&AUTO, SHARDS);
    assert_eq!(world.work(30, all_of_use), [2, 4, 8]);
    assert_eq!(world.why().unwrap(), "all of them are of use, and workers.max allows no more");
    let told = *world.scaled().last().unwrap();
    assert_eq!(
        told,
        (8, 8, true, "all of them are of use, and workers.max allows no more"),
        "it says that it stays"
    );
    let mut world = World::training(&[("workers.min", "3"), ("workers.max", "5")], SHARDS);
    let wanted = world.work(60, |_| 10_000);
    assert!(wanted.len() > 1 && wanted.iter().all(|n| (3..=5).contains(n)), "{wanted:?}");
    assert_eq!(world.workers().len(), 3, "more add nothing");
}

#[test]
fn a_number_that_somebody_asks_for_stays_and_auto_lets_the_master_find_out_again() {
    let mut world = World::training(&AUTO, SHARDS);
    world.work(10, all_of_use);
    assert_eq!(world.ask(|t| Event::Scale(t, Wanted::Fixed(3).into())), Some(Answer::Noted));
    let fixed = "somebody asked for so many, and no others are tried from now on";
    let last = *world.scaled().last().unwrap();
    assert_eq!((last.1, last.2, last.3), (3, false, fixed));
    assert_eq!(world.work(60, all_of_use), [3]);
    assert_eq!(world.why(), None);
    assert_eq!(world.ask(|t| Event::Scale(t, Wanted::Auto.into())), Some(Answer::Noted));
    assert_eq!(*world.scaled().last().unwrap(), (3, 3, true, "somebody asked for as many as are of use"));
    assert_eq!(world.work(30, all_of_use), [3, 6, 8, 6, 8], "both sides with the same care");
    assert_eq!(world.ask(|t| Event::Scale(t, Wanted::Fixed(1).into())), Some(Answer::Noted));
    assert_eq!(world.ask(|t| Event::Scale(t, Wanted::Fixed(1).into())), Some(Answer::Noted));
    assert_eq!(*world.scaled().last().unwrap(), (1, 1, false, "somebody asked for so many"));
}

#[test]
fn a_job_with_a_given_number_stays_at_it_until_somebody_asks_for_auto() {
    let mut world = World::training(&[], SHARDS);
    assert_eq!((world.work(60, all_of_use), world.why()), (vec![2], None));
    world.ask(|t| Event::Scale(t, Wanted::Auto.into()));
    assert_eq!(world.work(30, all_of_use), [2, 4]);
}

/// Goal: a new master begins with what the last one had found, and knows whether a person had said so.
#[test]
fn the_next_master_goes_on_with_the_number_that_was_found_or_asked_for() {
    let mut world = World::training(&AUTO, SHARDS);
    assert_eq!(world.work(30, all_of_use), [2, 4, 8]);
    let mut world = world.master_dies();
    world.tick(50);
    assert_eq!((world.workers().len(), world.why()), (8, Some("measures how fast they are".into())));
    world.ask(|t| Event::Scale(t, Wanted::Fixed(5).into()));
    let mut world = world.master_dies();
    world.tick(50);
    assert_eq!((world.workers().len(), world.why()), (5, None));
    world.ask(|t| Event::Scale(t, Wanted::Auto.into()));
    let world = world.master_dies();
    assert!(world.why().is_some());
}

/// Goal: workers that evaluate train nothing, which is no reason to ask for others.
#[test]
fn nothing_is_measured_while_the_model_is_judged() {
    let mut world = World::training(&[AUTO[0], AUTO[1], ("evaluate.every", "60s")], SHARDS);
    assert!(world.train_one(0), "there is something to judge");
    world.tick(60_000);
    assert_eq!(world.work(20, all_of_use), [2]);
    let judging = world.lease(0).unwrap();
    assert_eq!(judging.task, "evaluate/1/0");
    assert!(world.report(0, &judging, scored(good_scores())));
    assert_eq!(world.work(5, all_of_use), [2, 4, 8]);
}

#[test]
fn nothing_is_measured_while_a_server_is_away_or_tasks_run_out() {
    let mut world = World::training(&AUTO, SHARDS);
    world.kill(Role::Server, 0);
    assert_eq!(world.work(20, all_of_use), [2], "a server is away");
    world.serve();
    assert_eq!(world.work(5, all_of_use), [2, 4, 8]);
    let mut world = World::training(&AUTO, 3);
    assert_eq!(world.work(20, all_of_use), [2], "one task waits, and two are leased");
}

/// Goal: servers that cut a checkpoint are no reason to think less of the workers, unless they do so all the time.
#[test]
fn a_window_in_which_a_checkpoint_is_cut_does_not_count_where_that_is_rare() {
    let wanted = |every: &'static str| {
        let mut world = World::training(&[AUTO[0], AUTO[1], ("checkpoint.every", every)], SHARDS);
        world.work(6, all_of_use)
    };
    assert_eq!(wanted("1h"), [2, 4, 8]);
    assert_eq!(wanted("5s"), [2, 4], "what was measured from the fifth second on is measured again");
    assert_eq!(wanted("4s"), [2, 4, 8], "they are part of how fast the job is");
}

/// The next master of a job that has two workers and two servers is started with these numbers.
fn next_master(world: World, wanted: ScaleRequest, all_are_gone: bool) -> World {
    let (mut book, committed) = (world.book, world.job.committed.clone());
    if all_are_gone {
        book.processes.clear();
    }
    let entries = wanted.entries(&world.job.plan.job, &book);
    entries.iter().for_each(|entry| book.apply(entry));
    let mut next = World::with(&world.extra, book, committed);
    next.find_shards(world.shards);
    next.tick(10);
    next
}

fn places(world: &World) -> Vec<u32> {
    world.job.places.iter().map(|place| place.server).collect()
}

#[test]
fn a_job_that_is_resumed_with_other_numbers_has_them_from_the_start_and_keeps_them() {
    let both = ScaleRequest { workers: Some(Wanted::Fixed(1)), servers: Some(3) };
    let world = next_master(World::training(&[], 8), both, true);
    assert_eq!((places(&world), world.job.servers_wanted), (vec![0, 1, 2, 0], 3));
    assert_eq!(world.workers().len(), 1);
    let world = next_master(world, ScaleRequest { workers: None, servers: Some(1) }, true);
    assert_eq!((places(&world), world.job.servers_wanted), (vec![0; 4], 1));
    let world = next_master(world, Wanted::Auto.into(), true);
    assert_eq!((places(&world), world.workers().len()), (vec![0; 4], 1), "auto begins with what there was");
    assert!(world.job.useful.is_some());
    let world = next_master(world, ScaleRequest::default(), true);
    assert_eq!((places(&world), world.job.useful.is_some()), (vec![0; 4], true));
}

#[test]
fn servers_that_still_run_when_a_job_is_resumed_with_more_of_them_give_partitions_away_as_ever() {
    let mut world =
        next_master(World::training(&[], 8), ScaleRequest { workers: None, servers: Some(3) }, false);
    assert_eq!(places(&world), [0, 1, 0, 1], "what is served stays where it is");
    world.ready(2, &[]);
    world.tick(10);
    let (command, order) = world.ordered(2).unwrap();
    assert_eq!((order.from.as_str(), order.partitions[0].partition), ("address-0", 0));
    assert_eq!(world.copied(2, command, ""), copied_reply::What::Take(true));
    world.ready(2, &[(0, 2)]);
    assert_eq!((places(&world), world.job.replayed), (vec![2, 1, 0, 1], 0));
}

#[test]
fn numbers_that_a_job_cannot_have_are_told_with_what_is_possible() {
    let world = World::new(&[]);
    let job = &world.job.plan.job;
    let refusal = |workers: Option<u32>, servers: Option<u32>| {
        ScaleRequest { workers: workers.map(Wanted::Fixed), servers }.refusal(job).unwrap_or_default()
    };
    assert_eq!((refusal(None, None), refusal(Some(4), Some(4))), (String::new(), String::new()));
    for servers in [0, 5] {
        let why = format!("{servers} servers are wanted; from 1 to servers.partitions = 4 are possible");
        assert_eq!(refusal(Some(1), Some(servers)), why);
    }
    for workers in [0, 5] {
        let why = format!("{workers} workers are wanted; from 1 to workers.max = 4 are possible");
        assert_eq!(refusal(Some(workers), None), why);
    }
}
