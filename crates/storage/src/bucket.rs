//! Calls to object storage: an object is read, written and removed as a whole or not at all.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use futures::{StreamExt, TryStreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientOptions, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig,
};

use crate::edge::wait;
use crate::refusal::refusal;

/// How long a call that fails is tried again. A master that cannot write its ledger for longer ends, and its
/// workers and servers wait for the next one.
const RETRY: Duration = Duration::from_secs(20);
const RETRIES_MAX: usize = 1000;
const PAUSE_MAX: Duration = Duration::from_secs(2);
const CONNECT: Duration = Duration::from_secs(5);
/// How long one try may take: a part of a large object over a slow line.
const TRY: Duration = Duration::from_secs(60);
/// Objects that are read at once.
const AT_ONCE: usize = 16;

/// Buckets that were used: connections are shared, and keys of a role fetched once.
static OPEN: Mutex<BTreeMap<String, Arc<dyn ObjectStore>>> = Mutex::new(BTreeMap::new());

/// An object, or a prefix that stands for a directory.
#[derive(Debug, Clone)]
pub struct Place {
    /// The bucket.
    pub store: Arc<dyn ObjectStore>,
    /// The object in it.
    pub key: Key,
    bucket: String,
    /// For messages.
    pub url: String,
}

impl Place {
    /// The place that a URL names.
    pub fn of(url: &Path) -> io::Result<Place> {
        let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidInput, what);
        let url = url.to_str().ok_or_else(|| wrong("a URL is text".into()))?;
        let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong(format!("{url} is no URL")))?;
        if scheme != "s3" {
            let what = format!("{scheme}:// is no object storage that this program knows; s3:// is");
            return Err(wrong(what));
        }
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(wrong(format!("{url} names no bucket; write s3://BUCKET/…")));
        }
        let key = Key::parse(key).map_err(|e| wrong(format!("{url} names no object: {e}")))?;
        Ok(Place { store: store(bucket)?, key, bucket: bucket.into(), url: url.into() })
    }

    /// Says why a call for this place failed.
    pub fn refused(&self) -> impl Fn(object_store::Error) -> io::Error + Send + 'static {
        let (url, bucket) = (self.url.clone(), self.bucket.clone());
        move |error| refusal(&error, &url, &bucket)
    }

    /// All of the object.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        wait(self.clone().get())
    }

    async fn get(self) -> io::Result<Vec<u8>> {
        let refused = self.refused();
        let found = self.store.get(&self.key).await.map_err(&refused)?;
        found.bytes().await.map(Vec::from).map_err(refused)
    }

    /// What is known of the object without reading it.
    pub fn look(&self) -> io::Result<ObjectMeta> {
        let (place, refused) = (self.clone(), self.refused());
        wait(async move { place.store.head(&place.key).await.map_err(refused) })
    }

    pub fn exists(&self) -> io::Result<bool> {
        match self.look() {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    pub fn modified(&self) -> io::Result<SystemTime> {
        Ok(self.look()?.last_modified.into())
    }

    /// Writes the object, whatever was there.
    pub fn put(&self, content: Vec<u8>) -> io::Result<()> {
        self.put_with(content, PutMode::Overwrite)
    }

    /// Writes the object where none is; of several who try one succeeds.
    pub fn put_new(&self, content: Vec<u8>) -> io::Result<()> {
        self.put_with(content, PutMode::Create)
    }

    fn put_with(&self, content: Vec<u8>, mode: PutMode) -> io::Result<()> {
        let (place, refused) = (self.clone(), self.refused());
        wait(async move {
            let options = PutOptions::from(mode);
            place.store.put_opts(&place.key, content.into(), options).await.map(drop).map_err(refused)
        })
    }

    /// Names directly below this prefix.
    pub fn list(&self) -> io::Result<Vec<String>> {
        let (place, refused) = (self.clone(), self.refused());
        wait(async move {
            let found = place.store.list_with_delimiter(Some(&place.key)).await.map_err(refused)?;
            let objects = found.objects.iter().map(|object| &object.location);
            let names = objects.chain(&found.common_prefixes).filter_map(|key| key.filename());
            Ok(names.map(String::from).collect())
        })
    }

    pub fn remove(&self) -> io::Result<()> {
        let (place, refused) = (self.clone(), self.refused());
        wait(async move {
            match place.store.delete(&place.key).await {
                Err(object_store::Error::NotFound { .. }) => Ok(()),
                other => other.map_err(refused),
            }
        })
    }

    /// Removes everything below this prefix.
    pub fn remove_all(&self) -> io::Result<()> {
        let (place, refused) = (self.clone(), self.refused());
        wait(async move {
            let below = place.store.list(Some(&place.key)).map_ok(|object| object.location).boxed();
            place.store.delete_stream(below).map_ok(drop).try_collect().await.map_err(refused)
        })
    }

    /// All objects below this prefix.
    fn below(&self) -> io::Result<Vec<Key>> {
        let (place, refused) = (self.clone(), self.refused());
        wait(async move {
            let below = place.store.list(Some(&place.key)).map_ok(|object| object.location);
            below.try_collect().await.map_err(refused)
        })
    }
}

/// All of several objects, some at a time, in their order.
pub fn read_all(names: &[PathBuf]) -> io::Result<Vec<Vec<u8>>> {
    let places: io::Result<Vec<Place>> = names.iter().map(|name| Place::of(name)).collect();
    let places = places?;
    wait(
        async move { stream::iter(places.into_iter().map(Place::get)).buffered(AT_ONCE).try_collect().await },
    )
}

/// Removes objects of one bucket, many in a call.
pub fn remove_each(names: &[PathBuf]) -> io::Result<()> {
    let places: io::Result<Vec<Place>> = names.iter().map(|name| Place::of(name)).collect();
    let places = places?;
    let Some(first) = places.first().cloned() else { return Ok(()) };
    wait(async move {
        let keys = stream::iter(places.into_iter().map(|place| Ok(place.key))).boxed();
        first.store.delete_stream(keys).map_ok(drop).try_collect().await.map_err(first.refused())
    })
}

/// The URLs that a pattern names, sorted.
pub fn matching(pattern: &str) -> io::Result<Vec<String>> {
    let place = Place::of(Path::new(fixed(pattern)))?;
    let root = format!("s3://{}/", place.bucket);
    // As for files: what is being made has a name with a leading dot, which `*` must not find.
    let options = glob::MatchOptions {
        case_sensitive: true,
        require_literal_separator: true,
        require_literal_leading_dot: true,
    };
    let invalid = |e| io::Error::new(io::ErrorKind::InvalidInput, e);
    let wanted = glob::Pattern::new(pattern.strip_prefix(&root).unwrap_or_default()).map_err(invalid)?;
    let mut found = place.below()?;
    found.retain(|key| wanted.matches_with(key.as_ref(), options));
    found.sort();
    Ok(found.iter().map(|key| format!("{root}{key}")).collect())
}

/// The directory that everything a pattern names is in.
fn fixed(pattern: &str) -> &str {
    let wild = pattern.find(['*', '?', '[']).unwrap_or(pattern.len());
    let bucket = pattern.find("://").map_or(0, |at| at + "://".len());
    let end = pattern[..wild].rfind('/').filter(|end| *end >= bucket);
    end.map_or(pattern, |end| &pattern[..end])
}

/// Looks for an object where `url` is; whoever asks waits for the answer, so it is not tried for long.
pub fn reach(url: &Path) -> io::Result<()> {
    const RETRIES: usize = 2;
    let mut place = Place::of(Path::new(fixed(url.to_str().unwrap_or_default())))?;
    place.store = build(&place.bucket, RETRIES)?;
    let refused = place.refused();
    wait(async move {
        place.store.list(Some(&place.key)).take(1).map_ok(drop).try_collect().await.map_err(refused)
    })
}

/// The bucket with this name.
fn store(bucket: &str) -> io::Result<Arc<dyn ObjectStore>> {
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(store) = open.get(bucket) {
        return Ok(Arc::clone(store));
    }
    let store = build(bucket, RETRIES_MAX)?;
    open.insert(bucket.into(), Arc::clone(&store));
    Ok(store)
}

/// A bucket as the environment describes it.
fn build(bucket: &str, max_retries: usize) -> io::Result<Arc<dyn ObjectStore>> {
    // Another one may be installed already, which does as well.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let backoff = BackoffConfig { max_backoff: PAUSE_MAX, ..BackoffConfig::default() };
    let retry = RetryConfig { backoff, max_retries, retry_timeout: RETRY };
    // Client options replace those of the environment, so this one is said again.
    let http = std::env::var("AWS_ALLOW_HTTP").is_ok_and(|said| matches!(&*said, "1" | "true" | "TRUE"));
    let client = ClientOptions::new().with_connect_timeout(CONNECT).with_timeout(TRY).with_allow_http(http);
    let built = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_retry(retry)
        .with_client_options(client)
        .build();
    Ok(Arc::new(built.map_err(|e| refusal(&e, &format!("s3://{bucket}"), bucket))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_pattern_names_lies_below_what_is_fixed_of_it() {
        assert_eq!(fixed("s3://b/data/train-*.tsv"), "s3://b/data");
        assert_eq!(fixed("s3://b/*/x"), "s3://b");
        assert_eq!(fixed("s3://b/ckpt"), "s3://b");
        assert_eq!(fixed("s3://b"), "s3://b");
    }
}
