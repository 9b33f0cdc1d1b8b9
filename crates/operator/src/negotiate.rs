//! How many workers each job may have, so that jobs of one priority share a cluster by agreement.
//!
//! [`negotiate`] is a function of the cluster, the jobs, and what each of them holds. It does no IO and reads
//! no clock; it is called again whenever something changed.
//!
//! - **Higher priorities first.** The rest is about equals; lower ones get what these leave.
//! - **A late job is let in at once**, with its master, its servers and `min` workers. Where the cluster is
//!   full, the others give up workers, those furthest above their share first, but none below its own `min`.
//! - **Jobs whose `min` does not fit wait** in the order in which they came. A later one may pass only where
//!   the waiting one would still fit beside all that passed it, so a job waits for jobs that came before it
//!   and for no others: when these have ended, it starts. Nothing idles for its sake, because jobs that run
//!   fill the room with workers above their `min`, and give them up in time.
//! - **Above `min`, room is evened out by weight**: the next worker goes to the job with the smallest share
//!   that can use one and has room for it. A job's share is the largest part that its workers take of any one
//!   resource of the cluster, divided by its weight.
//! - **What is held stays** where that is fair enough. Workers move from one job to another only if the
//!   giver, having given, would not be below the receiver, having received one. So a job that is one worker
//!   ahead of its equal stays ahead, small changes of what jobs can use move nothing between others, and
//!   asking again gives the same answer.
//!
//! Pods are placed in thought, each on one node (`room.rs`). The true scheduler may place them otherwise and
//! pods that run don't move; a pod that it finds no node for stays pending until another one ends.

use std::cmp::Reverse;
use std::fmt;
use std::num::NonZeroU32;

pub use resources::Resources;
use room::{Pods, Room};

#[cfg(test)]
mod properties;
mod resources;
mod room;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

/// How many workers each job may have: one grant for each job, the first served first.
pub fn negotiate(cluster: &Cluster, jobs: &[Job]) -> Vec<Grant> {
    let empty = Room::new(&cluster.nodes);
    let mut seats: Vec<Seat> = jobs.iter().map(|job| Seat::new(job, &empty)).collect();
    seats.sort_by_key(|seat| (Reverse(seat.job.priority), seat.job.arrival, &seat.job.name));
    let mut room = empty.clone();
    let mut grants = Vec::new();
    for seats in seats.chunk_by(|a, b| a.job.priority == b.job.priority) {
        let table = Table { room: &room, seats };
        let counts = table.share_out();
        grants.extend(seats.iter().zip(&counts).enumerate().map(|(n, (seat, &workers))| Grant {
            job: seat.job.name.clone(),
            workers,
            reason: table.reason(n, &counts, &empty),
        }));
        room = table.less(&counts).expect("what is granted fits");
    }
    grants
}

/// The nodes that our jobs may use.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cluster {
    /// For each schedulable node what our jobs may use of it: what it has, less what others use. What our
    /// jobs use now is not taken off.
    pub nodes: Vec<Resources>,
}

/// A job that wants workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    /// Its name, which no other job has.
    pub name: String,
    /// Higher ones are served first.
    pub priority: i32,
    /// Its part of the room beside that of its equals.
    pub weight: NonZeroU32,
    /// When it came: any number that grows. Names decide between two of the same time.
    pub arrival: u64,
    /// Workers without which it does not run. At least one is reserved in any case.
    pub min: u32,
    /// Never more workers than that.
    pub max: u32,
    /// How many it can use at this moment, in its own opinion. Less than `min` reserves `min` all the same.
    pub useful: u32,
    /// What one worker takes.
    pub worker: Resources,
    /// What its other pods take, one entry for each: the master and the servers.
    pub overhead: Vec<Resources>,
    /// Workers that it holds: those of its last grant or, where that is not known, its pods that run or are
    /// pending. None: it has not started.
    pub held: u32,
}

/// How many workers a job may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// Whose it is.
    pub job: String,
    /// That many workers, at least the job's `min`; or none, and then no other pod of the job should run
    /// either.
    pub workers: u32,
    /// Why.
    pub reason: Reason,
}

/// Why a job may have as many workers as it may.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// It has all that it can use.
    Enough,
    /// It has what its equals leave it.
    Share {
        /// How many jobs share, with this one.
        jobs: usize,
    },
    /// Its `min` is all that there is room for.
    Least,
    /// Its `min` does not fit beside jobs that came before it.
    NoRoom,
    /// It would fit, but then a job that came first would not, later.
    Behind {
        /// That job.
        job: String,
    },
    /// Jobs of higher priority leave too little.
    Outranked,
    /// Its `min` would not fit if there were no other job.
    TooLarge,
}

impl Reason {
    /// It in a word, for programs.
    pub fn word(&self) -> &'static str {
        match self {
            Reason::Enough => "Enough",
            Reason::Share { .. } => "Share",
            Reason::Least => "Least",
            Reason::NoRoom => "NoRoom",
            Reason::Behind { .. } => "Behind",
            Reason::Outranked => "Outranked",
            Reason::TooLarge => "TooLarge",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Enough => write!(f, "has all the workers it can use"),
            Reason::Share { jobs: 1 } => write!(f, "has all the room there is"),
            Reason::Share { jobs } => write!(f, "shares the room with {} of its priority", others(jobs - 1)),
            Reason::Least => write!(f, "has its least number of workers: there is no room for more"),
            Reason::NoRoom => {
                write!(f, "waits: its least number of workers does not fit beside jobs that came first")
            }
            Reason::Behind { job } => {
                write!(f, "waits behind job {job:?}, which came first and needs the room")
            }
            Reason::Outranked => write!(f, "waits: jobs of higher priority need the room"),
            Reason::TooLarge => {
                write!(
                    f,
                    "cannot start: its least number of workers would not fit into the cluster if it were alone"
                )
            }
        }
    }
}

fn others(jobs: usize) -> String {
    if jobs == 1 { "1 other job".to_owned() } else { format!("{jobs} other jobs") }
}

/// A job at the table, with figures that don't change while it is negotiated.
struct Seat<'a> {
    job: &'a Job,
    /// Least and most workers.
    floor: u32,
    cap: u32,
    /// The parts of the cluster that a worker and the other pods take, each.
    worker: u64,
    overhead: Vec<u64>,
}

impl<'a> Seat<'a> {
    fn new(job: &'a Job, empty: &Room) -> Self {
        let floor = job.min.min(job.max).max(1);
        Seat {
            job,
            floor,
            cap: job.max.min(job.useful).max(floor),
            worker: empty.part(&job.worker),
            overhead: job.overhead.iter().map(|size| empty.part(size)).collect(),
        }
    }

    /// The share that so many workers are.
    fn share(&self, workers: u32) -> u128 {
        ((u128::from(workers) * u128::from(self.worker)) << SHARE_BITS) / u128::from(self.job.weight.get())
    }

    /// The most workers whose share is at most this one.
    fn workers_at(&self, share: u128) -> u32 {
        let workers = share * u128::from(self.job.weight.get()) / (u128::from(self.worker) << SHARE_BITS);
        u32::try_from(workers).unwrap_or(u32::MAX)
    }

    /// The fewest workers whose share is at least this one.
    fn workers_from(&self, share: u128) -> u32 {
        let workers = self.workers_at(share);
        if self.share(workers) < share { workers.saturating_add(1) } else { workers }
    }

    /// The pods of the job when it has so many workers; none at all when it has no worker.
    fn pods(&self, workers: u32) -> impl Iterator<Item = Pods<'_>> {
        let overhead = self.job.overhead.iter().zip(&self.overhead);
        let overhead = overhead.map(|(size, &part)| Pods { part, size, count: 1 });
        let worker = Pods { part: self.worker, size: &self.job.worker, count: workers };
        overhead.chain([worker]).filter(move |_| workers > 0)
    }
}

/// Whether nobody has more here than there, and some have less.
fn below(here: &[u32], there: &[u32]) -> bool {
    here != there && here.iter().zip(there).all(|(here, there)| here <= there)
}

/// Bits after the point of a share: parts have 32 before it, counts and weights 32, so that all products fit.
const SHARE_BITS: u32 = 24;

/// Equals, in the order in which they came, and the room that they negotiate about.
struct Table<'a> {
    room: &'a Room,
    seats: &'a [Seat<'a>],
}

impl Table<'_> {
    /// Workers for each of these equals.
    fn share_out(&self) -> Vec<u32> {
        let admitted = self.admit();
        let of = |workers: fn(&Seat) -> u32| -> Vec<u32> {
            let each = self.seats.iter().zip(&admitted);
            each.map(|(seat, &admitted)| if admitted { workers(seat) } else { 0 }).collect()
        };
        let (floors, caps, held) = (of(|s| s.floor), of(|s| s.cap), of(|s| s.job.held.clamp(s.floor, s.cap)));
        let even = self.fill(floors.clone(), &caps, &floors);
        let kept =
            if self.less(&held).is_some() { held.clone() } else { self.fill(floors.clone(), &held, &held) };
        let kept = self.fill(kept, &caps, &held);
        // The even split knows nothing of what is held: what may stay beside it once may stay again.
        let may_stay = |counts: &Vec<u32>| *counts == even || !below(counts, &even) && self.fair(counts);
        if may_stay(&kept) {
            return kept;
        }
        let near = self.fill(floors, &caps, &held);
        if may_stay(&near) { near } else { even }
    }

    /// The room that is left when each has so many workers, or `None` where that does not fit.
    fn less(&self, counts: &[u32]) -> Option<Room> {
        self.room.less(self.seats.iter().zip(counts).flat_map(|(seat, &count)| seat.pods(count)).collect())
    }

    /// Whether these jobs fit together with the fewest workers.
    fn together(&self, members: impl Iterator<Item = usize>) -> bool {
        self.room.less(members.flat_map(|n| self.seats[n].pods(self.seats[n].floor)).collect()).is_some()
    }

    /// Which jobs may run.
    fn admit(&self) -> Vec<bool> {
        let all = || 0..self.seats.len();
        let started: Vec<bool> = self.seats.iter().map(|seat| seat.job.held > 0).collect();
        // Nobody that runs is sent away while all that run fit. Where a node was lost and they don't, those
        // that came last go.
        if self.together(all().filter(|&n| started[n])) {
            return self.let_in(started);
        }
        let mut admitted = vec![false; self.seats.len()];
        for n in all().filter(|&n| started[n]) {
            admitted[n] = self.together(all().filter(|&m| admitted[m] || m == n));
        }
        self.let_in(admitted)
    }

    /// Lets in those that wait, first come, first served, until no more of them may enter.
    fn let_in(&self, mut admitted: Vec<bool>) -> Vec<bool> {
        let waiting = |admitted: &[bool]| {
            (0..self.seats.len())
                .find(|&n| !admitted[n] && self.fits(n, admitted) && self.passes(n, admitted).is_ok())
        };
        while let Some(n) = waiting(&admitted) {
            admitted[n] = true;
        }
        admitted
    }

    /// Whether a job fits beside those that are admitted.
    fn fits(&self, n: usize, admitted: &[bool]) -> bool {
        self.together((0..self.seats.len()).filter(|&m| admitted[m] || m == n))
    }

    /// Whether a job may enter before those that wait and came first; otherwise, the one that it stays
    /// behind.
    fn passes(&self, n: usize, admitted: &[bool]) -> Result<(), usize> {
        let harmed = (0..n).filter(|&first| !admitted[first]).find(|&first| {
            let passed = (first + 1..self.seats.len()).filter(|&m| admitted[m] || m == n);
            self.together([first].into_iter()) && !self.together([first].into_iter().chain(passed))
        });
        harmed.map_or(Ok(()), Err)
    }

    /// Gives workers one at a time to the job with the smallest share, as far as there is room and none gets
    /// more than its limit. Where shares are the same, a job that holds more already comes before one that
    /// came first.
    fn fill(&self, mut counts: Vec<u32>, limits: &[u32], held: &[u32]) -> Vec<u32> {
        let next = |open: &[usize], counts: &[u32]| {
            open.iter().copied().min_by_key(|&n| (self.seats[n].share(counts[n]), counts[n] >= held[n], n))
        };
        loop {
            let before = counts.clone();
            let mut open: Vec<usize> = (0..self.seats.len()).collect();
            self.raise(&mut counts, limits, &open);
            loop {
                open.retain(|&n| counts[n] < limits[n]);
                let Some(n) = next(&open, &counts) else { break };
                counts[n] += 1;
                if self.less(&counts).is_none() {
                    counts[n] -= 1;
                    // Whether pods fit does not depend on whose they are.
                    open.retain(|&m| self.seats[m].job.worker != self.seats[n].job.worker);
                    self.raise(&mut counts, limits, &open);
                }
            }
            // Packing is a rule of thumb: what found no room may find some after another pod was added.
            if counts == before {
                return counts;
            }
        }
    }

    /// Gives many workers at once: what the open jobs would get one at a time before any of them finds no
    /// room.
    ///
    /// At a level, each job whose share was not above it has got one more worker.
    fn raise(&self, counts: &mut Vec<u32>, limits: &[u32], open: &[usize]) {
        let share = |n: &usize| self.seats[*n].share(counts[*n]);
        let (Some(lowest), Some(step)) =
            (open.iter().map(share).min(), open.iter().map(|&n| self.seats[n].share(1)).max())
        else {
            return;
        };
        let (mut level, mut stride, mut doubling) = (lowest, step, true);
        while stride >= step {
            let mut raised = counts.clone();
            for &n in open {
                let workers = self.seats[n].workers_at(level + stride).saturating_add(1);
                raised[n] = counts[n].max(workers.min(limits[n]));
            }
            let fits = raised != *counts && self.less(&raised).is_some();
            if fits {
                level += stride;
                *counts = raised;
            }
            doubling &= fits;
            stride = if doubling { stride * 2 } else { stride / 2 };
        }
    }

    /// Whether nobody could get one more worker from another that, having given what it takes, would not be
    /// below it.
    fn fair(&self, counts: &[u32]) -> bool {
        let seats = || self.seats.iter().zip(counts).enumerate().filter(|(_, (_, count))| **count > 0);
        let wanting = seats().filter(|(_, (seat, count))| **count < seat.cap);
        wanting.into_iter().all(|(b, (behind, &has))| {
            let share = behind.share(has + 1);
            seats().filter(|&(a, _)| a != b).all(|(a, (ahead, &count))| {
                let least = ahead.workers_from(share).max(ahead.floor);
                let mut moved = counts.to_vec();
                (moved[a], moved[b]) = (least, has + 1);
                least >= count || self.less(&moved).is_none()
            })
        })
    }

    /// Why the job has what it has.
    fn reason(&self, n: usize, counts: &[u32], empty: &Room) -> Reason {
        let seat = &self.seats[n];
        let running = counts.iter().filter(|&&count| count > 0).count();
        match counts[n] {
            0 => self.reason_to_wait(n, counts, empty),
            count if count == seat.cap => Reason::Enough,
            count if count == seat.floor => Reason::Least,
            _ => Reason::Share { jobs: running },
        }
    }

    fn reason_to_wait(&self, n: usize, counts: &[u32], empty: &Room) -> Reason {
        let admitted: Vec<bool> = counts.iter().map(|&count| count > 0).collect();
        if !(Table { room: empty, seats: self.seats }).together([n].into_iter()) {
            Reason::TooLarge
        } else if !self.together([n].into_iter()) {
            Reason::Outranked
        } else if !self.fits(n, &admitted) {
            Reason::NoRoom
        } else {
            let first = self.passes(n, &admitted).expect_err("a job that fits and may enter has entered");
            Reason::Behind { job: self.seats[first].job.name.clone() }
        }
    }
}
