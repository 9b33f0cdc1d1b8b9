//! How many workers are of use: the master measures what more of them add, and asks for no others.
//!
//! [`Useful`] looks for the fewest workers that are as fast as any number of them, to within [`GAIN`]. It
//! doubles them while that pays, closes in on the number from which on more add nothing, and stays there.
//! Once in a while, at growing intervals, it looks whether a few more or fewer have become better. Fewer
//! workers also mean gradients that are less stale, so of two equally fast numbers the smaller one is right
//! in any case.
//!
//! It is pure: time, workers and records come in as values, and what it says is only ever a wish between
//! `min` and `max`. It does not know why fewer workers may be there than it wished for; it measures those
//! that are, and goes on wishing for as long as more would pay.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

#[cfg(test)]
mod tests;

/// More workers are kept if they make the job faster by this part. Medians of a few windows are certain to
/// about that much when windows scatter by 10 %, so less could not be told from chance; and no step is
/// smaller than an eighth of the workers, so that it would bring at least 12 % if all of its workers were of
/// full use.
pub const GAIN: f64 = 0.05;

/// After a change, the workers get that long to start reading and computing before anything is measured.
const WARM_UP: Duration = Duration::from_secs(1);
/// Workers that have not come for that long will not come soon: those that are there are measured.
const SHORTAGE: Duration = Duration::from_secs(10);
/// Speed is measured over windows of at least this length, which begin and end with news of records. Workers
/// tell news five times a second, so that what an end does not know of is at most a fifth of a window.
const WINDOW: Duration = Duration::from_secs(1);
/// A window has at least this much news from each worker: large batches take longer windows.
const NEWS_EACH: u32 = 4;
/// How many windows make a speed certain: the first time, and by how far it is from the fastest other one. So
/// a step that pays well takes one window, and time is spent only where the choice matters little.
const WINDOWS_FIRST: usize = 2;
const WINDOWS: [(f64, usize); 2] = [(1.4, 1), (1.2, 3)];
/// The most windows, where two speeds are close. No more are kept, so that a speed is a recent one.
const WINDOWS_CLOSE: usize = 8;
/// How long to stay before looking again, at first and at most. It doubles each time that nothing has
/// changed.
const STAY_FIRST: Duration = Duration::from_secs(120);
const STAY_LONGEST: Duration = Duration::from_secs(30 * 60);

/// Finds out how many workers are of use.
#[derive(Debug, Clone)]
pub struct Useful {
    min: u32,
    max: u32,
    target: Target,
    /// What was measured, by number of workers.
    speeds: BTreeMap<u32, Speed>,
    /// Workers there are, and records at the last news.
    workers: u32,
    records: u64,
    /// Nothing is measured before this.
    warm_at: Duration,
    window: Option<Window>,
    stay: Stay,
}

/// How many workers to ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// That many.
    pub workers: u32,
    /// Why.
    pub reason: Reason,
}

/// Why so many workers are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// There is nothing to compare with yet.
    Measures,
    /// To find out whether they are better than so many.
    Tries {
        /// The best number so far.
        than: u32,
    },
    /// More of them would add too little.
    Enough,
    /// All of them are of use, and `max` allows no more.
    Max,
}

impl Reason {
    /// Whether the number is found, and not one that is tried.
    pub fn is_settled(self) -> bool {
        matches!(self, Reason::Enough | Reason::Max)
    }
}

/// The smallest step from so many workers: see [`GAIN`].
fn grain(workers: u32) -> u32 {
    (workers / 8).max(1)
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Measures => write!(f, "measures how fast they are"),
            Reason::Tries { than } => write!(f, "tries whether that is better than {than}"),
            Reason::Enough => write!(f, "more would add less than {:.0} %", 100.0 * GAIN),
            Reason::Max => write!(f, "all of them are of use, and workers.max allows no more"),
        }
    }
}

/// Records a second in the latest windows.
#[derive(Debug, Clone, Default)]
struct Speed(VecDeque<f64>);

/// A window that is open.
#[derive(Debug, Clone, Copy)]
struct Window {
    began: Duration,
    records: u64,
    news: u32,
}

/// When to look again.
#[derive(Debug, Clone, Copy, Default)]
struct Stay {
    /// Until then, once a number is found.
    until: Option<Duration>,
    /// The number that was found last, and how long that was to last.
    found: Option<(u32, Duration)>,
}

impl Useful {
    /// Between `min` and `max` workers, beginning with `start`. At least one is asked for in any case.
    pub fn new(min: u32, max: u32, start: u32) -> Self {
        let max = max.max(1);
        let min = min.clamp(1, max);
        Useful {
            min,
            max,
            target: Target { workers: start.clamp(min, max), reason: Reason::Measures },
            speeds: BTreeMap::new(),
            workers: 0,
            records: 0,
            warm_at: Duration::ZERO,
            window: None,
            stay: Stay::default(),
        }
    }

    /// So many workers to ask for, and why.
    pub fn target(&self) -> Target {
        self.target
    }

    /// So many workers may be of use soon, in whatever number they come: while that is being found out, any
    /// number up to `max`; later on those that are, and what the next look may try.
    pub fn most(&self) -> u32 {
        match self.target.reason {
            Reason::Enough => (self.target.workers + grain(self.target.workers)).min(self.max),
            Reason::Measures | Reason::Tries { .. } | Reason::Max => self.max,
        }
    }

    /// So many workers are at work, and so many records have been trained so far. To be called at all news of
    /// records, and when the number of workers changes.
    pub fn observe(&mut self, now: Duration, workers: u32, records: u64) {
        // Records that are trained again are taken off first.
        let (disturbed, news) = (workers != self.workers || records < self.records, records > self.records);
        (self.workers, self.records) = (workers, records);
        if disturbed {
            self.disturb(now);
        }
        // Other numbers may be there for a while, but are not to be asked for.
        let allowed = (self.min..=self.max).contains(&workers);
        if !news || !allowed || now < self.warm_at {
            return;
        }
        let Some(window) = &mut self.window else {
            self.window = Some(Window { began: now, records, news: 0 });
            return;
        };
        window.news += 1;
        let time = now.saturating_sub(window.began);
        if time >= WINDOW && window.news >= NEWS_EACH.saturating_mul(workers) {
            let speed = (records - window.records) as f64 / time.as_secs_f64();
            self.window = Some(Window { began: now, records, news: 0 });
            self.speeds.entry(workers).or_default().add(speed);
            self.decide(now);
        }
    }

    /// Something happened that says nothing about the number of workers: a death, a replay, an evaluation, a
    /// checkpoint that held everybody up. The window that is open does not count.
    pub fn disturb(&mut self, now: Duration) {
        self.window = None;
        self.warm_at = now + if self.workers < self.target.workers { SHORTAGE } else { WARM_UP };
    }

    /// The machines are not what they were: fewer workers came than were asked for, or there is room again.
    /// What was measured does not count any more.
    pub fn forget(&mut self, now: Duration) {
        self.ask(self.workers.clamp(self.min, self.max), Reason::Measures);
        self.disturb(now);
        self.speeds.clear();
        self.stay = Stay::default();
    }

    fn decide(&mut self, now: Duration) {
        if !self.is_certain(self.workers) {
            return;
        }
        if let Some(until) = self.stay.until {
            // What was measured long ago says nothing, so looking again begins with what is known of here.
            if now < until || self.workers != self.target.workers {
                return;
            }
            self.stay.until = None;
            self.speeds.retain(|&n, _| n == self.workers);
        }
        // A step that paid by little may owe that to chance, so both sides of it are looked at with the same
        // care.
        let doubtful = self.speeds.keys().copied().find(|&n| !self.is_certain(n));
        let best = self.best();
        match doubtful.or_else(|| self.next(best)) {
            Some(workers) => self.ask(workers, Reason::Tries { than: best }),
            None => self.settle(now, best),
        }
    }

    fn ask(&mut self, workers: u32, reason: Reason) {
        assert!((self.min..=self.max).contains(&workers), "{workers} workers are outside the limits");
        self.target = Target { workers, reason };
    }

    /// Whether the speed of so many workers is known well enough to compare it with that of other numbers.
    fn is_certain(&self, workers: u32) -> bool {
        let here = &self.speeds[&workers];
        let others = self.speeds.iter().filter(|&(&n, _)| n != workers).map(|(_, speed)| speed.median());
        let needed = others.max_by(f64::total_cmp).map_or(WINDOWS_FIRST, |other| {
            let apart = (here.median() / other).max(other / here.median());
            WINDOWS.iter().find(|(far, _)| apart > *far).map_or(WINDOWS_CLOSE, |&(_, windows)| windows)
        });
        here.0.len() >= needed
    }

    /// The fewest workers of which more would add too little, of the numbers tried.
    fn best(&self) -> u32 {
        let fastest = self.fastest();
        let enough = self.speeds.iter().find(|(_, speed)| speed.median() * (1.0 + GAIN) >= fastest);
        *enough.expect("the fastest is fast enough").0
    }

    fn fastest(&self) -> f64 {
        self.speeds.values().map(Speed::median).fold(0.0, f64::max)
    }

    /// The number of workers to try next, if any might be better than the best so far.
    fn next(&self, best: u32) -> Option<u32> {
        let tried = |range: Option<(&u32, &Speed)>| range.map(|(&n, _)| n);
        let below = tried(self.speeds.range(..best).next_back());
        let above = tried(self.speeds.range(best + 1..).next());
        let most = tried(self.speeds.last_key_value()).unwrap_or(best);
        // Looking again is done in small steps: it is not likely that much has changed.
        let again = self.stay.found.is_some_and(|(found, _)| found == best);
        let stride = if again { best.div_ceil(4) } else { best };
        let grain = grain(best);

        // If each worker added as much as those before, so many would be as fast as the fastest. So no fewer
        // than that, less the tolerance, can be enough; and it is not worth looking where this saves next to
        // nothing.
        let bend = below.map(|n| (n, f64::from(n) * self.fastest() / self.speeds[&n].median()));
        let fewer = bend.map(|(below, bend)| ((bend / (1.0 + GAIN)).ceil() as u32).max(below + 1));
        let fewer = fewer.filter(|fewer| fewer.saturating_add(grain) <= best);
        if fewer.is_some() && bend.is_some_and(|(below, bend)| bend <= f64::from(below + best) / 2.0) {
            // The last step was worth less than half of what it cost; those beyond would be worth even less.
            return fewer;
        }
        if most < self.max && most - best < best.div_ceil(4) && !self.falls_after(best) {
            return Some(best.saturating_add(stride).min(self.max));
        }
        if below.is_none() && best > self.min {
            return Some((best - stride.min(best.div_ceil(2))).max(self.min));
        }
        // Where more are in each other's way, a number between may be better than both.
        let between = above.filter(|above| above - best > grain && self.falls_after(best));
        between.map(|above| best + (above - best) / 2).or(fewer)
    }

    /// Whether more workers than these were slower.
    fn falls_after(&self, best: u32) -> bool {
        let speed = self.speeds[&best].median();
        self.speeds.range(best + 1..).any(|(_, slower)| slower.median() * (1.0 + GAIN) < speed)
    }

    fn settle(&mut self, now: Duration, best: u32) {
        let stay = match self.stay.found {
            Some((found, stay)) if found == best => (stay * 2).min(STAY_LONGEST),
            _ => STAY_FIRST,
        };
        self.stay = Stay { until: Some(now + stay), found: Some((best, stay)) };
        self.ask(best, if best >= self.max { Reason::Max } else { Reason::Enough });
    }
}

impl Speed {
    fn add(&mut self, speed: f64) {
        self.0.push_back(speed);
        if self.0.len() > WINDOWS_CLOSE {
            self.0.pop_front();
        }
    }

    fn median(&self) -> f64 {
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
    }
}
