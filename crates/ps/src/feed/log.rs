//! What was done to a partition and its backup has still to do, in order. Pure: `feed.rs` makes threads wait for it.

use std::collections::VecDeque;

/// What was done, and how much of it the backup has done too.
#[derive(Debug)]
pub struct Log<T> {
    /// What the backup has not fetched yet.
    waiting: VecDeque<T>,
    /// How many were ever added, and how many of them the backup has done.
    added: u64,
    done: u64,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Followed,
    Lost,
    Alone,
    Over,
}

impl<T> Default for Log<T> {
    fn default() -> Self {
        Log { waiting: VecDeque::new(), added: 0, done: 0, state: State::Followed }
    }
}

impl<T> Log<T> {
    /// Something was done. Returns its number: nobody may be told of it before [`Log::has`] says so.
    pub fn add(&mut self, what: T) -> u64 {
        self.added += 1;
        if self.state == State::Followed {
            self.waiting.push_back(what);
        }
        self.added
    }

    /// The number of what was done last.
    pub fn last(&self) -> u64 {
        self.added
    }

    /// The backup fetches what comes next, for as long as it fits.
    pub fn fetch(&mut self, mut fits: impl FnMut(&T) -> bool) -> Vec<T> {
        let count = self.waiting.iter().take_while(|what| fits(what)).count();
        self.waiting.drain(..count).collect()
    }

    /// Whether there is something to fetch.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The backup has done so many in all. `false`: it cannot have.
    pub fn done(&mut self, count: u64) -> bool {
        let fetched = self.added - self.waiting.len() as u64;
        if self.state != State::Followed || !(self.done..=fetched).contains(&count) {
            return false;
        }
        self.done = count;
        true
    }

    /// How many the backup has done.
    pub fn done_so_far(&self) -> u64 {
        self.done
    }

    /// Whether the one of this number may be told of: the backup has it, or is needed no more.
    pub fn has(&self, number: u64) -> bool {
        self.done >= number || self.state == State::Alone
    }

    /// The backup does not answer. What it has not done waits for the master's word. Tells whether this is news.
    pub fn lose(&mut self) -> bool {
        let news = self.state == State::Followed;
        if news {
            self.state = State::Lost;
            self.waiting.clear();
        }
        news
    }

    /// The master has written down that this backup is none any more.
    pub fn go_alone(&mut self) {
        self.state = State::Alone;
        self.waiting.clear();
    }

    /// The partition is another server's: what the backup has not done is never told.
    pub fn end(&mut self) {
        self.state = State::Over;
        self.waiting.clear();
    }

    /// Whether nobody needs to wait any more, because it will not come.
    pub fn is_over(&self) -> bool {
        self.state == State::Over
    }

    /// Whether the backup follows.
    pub fn is_followed(&self) -> bool {
        self.state == State::Followed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_may_be_told_when_the_backup_has_done_it() {
        let mut log = Log::default();
        assert_eq!((log.add('a'), log.add('b'), log.add('c')), (1, 2, 3));
        let mut room = 2;
        let fetched = log.fetch(|_| {
            room -= 1;
            room >= 0
        });
        assert_eq!(fetched, ['a', 'b']);
        assert!(!log.has(1), "fetched is not done");
        assert!(!log.done(3), "nobody has done what was not fetched");
        assert!(log.done(1));
        assert_eq!((log.has(1), log.has(2), log.is_empty()), (true, false, false));
        assert!(!log.done(0), "nothing is undone");
        assert_eq!(log.fetch(|_| true), ['c']);
        assert!(log.done(3) && log.has(3));
    }

    #[test]
    fn without_a_backup_nothing_is_told_before_the_master_knows() {
        let mut log = Log::default();
        log.add('a');
        assert!(log.lose() && !log.lose());
        assert_eq!(log.add('b'), 2);
        assert!(!log.has(1) && !log.has(2));
        assert!(!log.done(1), "one that was lost and comes back has missed something");
        assert!(log.is_empty() && !log.is_followed());
        log.go_alone();
        assert!(log.has(1) && log.has(2) && log.has(log.last()));
    }

    #[test]
    fn what_another_server_has_now_is_never_told_here() {
        let mut log = Log::default();
        log.add('a');
        log.lose();
        log.end();
        assert!(!log.has(1) && log.is_over() && !log.is_followed());
    }
}
