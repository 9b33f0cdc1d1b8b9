//! Parts of objects that were read, and those that will be read next.
//!
//! One cache for the process: shards that follow each other in an object share blocks, and a checkpoint's file
//! that is verified first and then read comes over the network once where it is small.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use object_store::{GetOptions, GetRange, ObjectStore};

use crate::bucket::Place;
use crate::edge::{spawn, wait};
use crate::refusal::{again, changed};

/// Bytes of a block: with those under way ahead of it enough for a fast reader, and little beside a shard.
pub const BLOCK: u64 = 512 << 10;
/// Blocks that are fetched ahead of a reader that goes from one to the next.
const AHEAD: u64 = 3;
/// Blocks that are kept; of a file read by columns, each column has one in use.
const KEPT: usize = 128;

type Fetch = Shared<BoxFuture<'static, Result<Bytes, Arc<io::Error>>>>;

/// Which block: the object, its version, and its number in it.
type Id = (Arc<str>, u64);

/// The newest first.
static CACHE: Mutex<VecDeque<(Id, Fetch)>> = Mutex::new(VecDeque::new());

/// An object of which blocks are fetched.
#[derive(Debug, Clone)]
pub struct Blocks {
    pub place: Place,
    pub bytes: u64,
    /// The version of the object that is meant; another one is an error.
    tag: Option<String>,
    id: Arc<str>,
}

impl Blocks {
    pub fn new(place: Place, bytes: u64, tag: Option<String>) -> Self {
        let id = format!("{} {bytes} {}", place.url, tag.as_deref().unwrap_or_default()).into();
        Blocks { place, bytes, tag, id }
    }

    /// Block `number`; where `ahead`, those behind it are begun too.
    pub fn get(&self, number: u64, ahead: bool) -> io::Result<Bytes> {
        let wanted = self.begin(number)?;
        if ahead {
            let last = (number + AHEAD).min(self.bytes.saturating_sub(1) / BLOCK);
            for next in number + 1..=last {
                drop(self.begin(next)?);
            }
        }
        let fetched = match wanted.peek() {
            Some(fetched) => fetched.clone(),
            None => wait(async move { Ok(wanted.await) })?,
        };
        fetched.map_err(|error| {
            // The next one who asks tries again.
            self.forget(number);
            again(&error)
        })
    }

    /// The fetch of a block, begun where it was not.
    fn begin(&self, number: u64) -> io::Result<Fetch> {
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        let id = (Arc::clone(&self.id), number);
        if let Some(at) = cache.iter().position(|(known, _)| *known == id) {
            let known = cache.remove(at).expect("it was just found");
            let fetch = known.1.clone();
            cache.push_front(known);
            return Ok(fetch);
        }
        let fetch = self.clone().fetch(number).boxed().shared();
        cache.push_front((id, fetch.clone()));
        cache.truncate(KEPT);
        drop(cache);
        spawn(fetch.clone().map(drop))?;
        Ok(fetch)
    }

    fn forget(&self, number: u64) {
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|((id, n), _)| (id, *n) != (&self.id, number));
    }

    async fn fetch(self, number: u64) -> Result<Bytes, Arc<io::Error>> {
        let start = number * BLOCK;
        let range = GetRange::Bounded(start..(start + BLOCK).min(self.bytes));
        let options = GetOptions { range: Some(range), if_match: self.tag.clone(), ..GetOptions::default() };
        let refused = self.place.refused();
        let got = self.place.store.get_opts(&self.place.key, options).await;
        let got = got.map_err(|e| Arc::new(refused(e)))?;
        // Not every server knows conditions, but all say what they send.
        if (got.meta.size, &got.meta.e_tag) != (self.bytes, &self.tag) {
            let said = format!(
                "{} bytes {:?} in place of {} {:?}",
                got.meta.size, got.meta.e_tag, self.bytes, self.tag
            );
            return Err(Arc::new(changed(&self.place.url, said)));
        }
        got.bytes().await.map_err(|e| Arc::new(refused(e)))
    }
}
