//! How long the operator takes and how often it asks: for people who run it, as Prometheus reads it. Read only.
//!
//! A look at a job begins with something that was seen: a change of the resource or of a master's pod, or the time
//! at which it was to be looked at again. It ends when the status is written, or when there is nothing to write.

#![expect(clippy::disallowed_methods, reason = "an edge: it reads the clock")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use http::Request;
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use tower::Service;
use tower::layer::layer_fn;

use crate::error::{Error, Result};
use crate::sharing::Key;

/// Upper bounds of the buckets, in seconds.
const BOUNDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0];

/// What the operator measures of itself.
#[derive(Debug, Default)]
pub struct Metrics {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Jobs with the first thing seen that no look has dealt with.
    seen: BTreeMap<Key, Instant>,
    /// When a job is to be looked at again.
    due: BTreeMap<Key, Instant>,
    /// By whether something was written.
    looks: [Histogram; 2],
    failed: u64,
    /// Requests to the API server, by verb and resource.
    requests: BTreeMap<(&'static str, String), Asked>,
}

impl Metrics {
    /// Something about a job was seen.
    pub fn seen(&self, job: &Key) {
        let now = Instant::now();
        self.state().seen.entry(job.clone()).or_insert(now);
    }

    /// A look at a job begins: since when it was due.
    pub fn begins(&self, job: &Key) -> Instant {
        let now = Instant::now();
        let mut state = self.state();
        let due = state.due.remove(job).filter(|due| *due <= now);
        let seen = state.seen.remove(job);
        [seen, due].into_iter().flatten().min().unwrap_or(now)
    }

    /// It ends: when the status was written, where it was, and when the job is to be looked at again.
    pub fn ends(&self, job: &Key, since: Instant, written: Option<Instant>, again: Option<Duration>) {
        let now = Instant::now();
        let mut state = self.state();
        let took = written.unwrap_or(now).saturating_duration_since(since);
        state.looks[usize::from(written.is_some())].add(took.as_secs_f64());
        if let Some(again) = again {
            state.due.insert(job.clone(), now + again);
        }
    }

    /// It failed, and is tried again: what was seen is still to be dealt with.
    pub fn fails(&self, job: &Key, since: Instant) {
        let mut state = self.state();
        state.failed += 1;
        let seen = state.seen.entry(job.clone()).or_insert(since);
        *seen = (*seen).min(since);
    }

    /// A client whose requests are counted.
    ///
    /// # Errors
    ///
    /// What `config` says makes no sense.
    pub fn client(self: &Arc<Self>, config: Config) -> Result<Client> {
        let metrics = Arc::clone(self);
        let layer = layer_fn(move |inner| Timed { inner, metrics: Arc::clone(&metrics) });
        let builder = ClientBuilder::try_from(config).map_err(|e| Error::Config(e.into()))?;
        Ok(builder.with_layer(&layer).build())
    }

    /// The API server began to answer something, or did not.
    fn answered(&self, what: (&'static str, String), took: Duration) {
        let mut state = self.state();
        let asked = state.requests.entry(what).or_default();
        asked.count += 1;
        asked.seconds += took.as_secs_f64();
        asked.longest = asked.longest.max(took.as_secs_f64());
    }

    /// Everything, as Prometheus reads it.
    pub fn text(&self) -> String {
        let state = self.state();
        let mut text = String::new();
        let name = "elasticdl_operator_look_seconds";
        let _ = writeln!(
            text,
            "# HELP {name} From what was seen of a job to its status written, or found as it is."
        );
        let _ = writeln!(text, "# TYPE {name} histogram");
        for (written, histogram) in ["false", "true"].into_iter().zip(&state.looks) {
            histogram.write(&mut text, name, written);
        }
        let name = "elasticdl_operator_look_seconds_max";
        let _ = writeln!(text, "# HELP {name} The longest of them.\n# TYPE {name} gauge");
        for (written, histogram) in ["false", "true"].into_iter().zip(&state.looks) {
            let _ = writeln!(text, "{name}{{written=\"{written}\"}} {}", histogram.longest);
        }
        let name = "elasticdl_operator_looks_failed_total";
        let _ =
            writeln!(text, "# HELP {name} Looks that failed and were tried again.\n# TYPE {name} counter");
        let _ = writeln!(text, "{name} {}", state.failed);
        let name = "elasticdl_operator_api_requests_total";
        let _ = writeln!(text, "# HELP {name} Requests to the API server.\n# TYPE {name} counter");
        for ((verb, resource), asked) in &state.requests {
            let _ = writeln!(text, "{name}{{verb=\"{verb}\",resource=\"{resource}\"}} {}", asked.count);
        }
        let name = "elasticdl_operator_api_request_seconds_total";
        let _ = writeln!(text, "# HELP {name} How long they waited for an answer.\n# TYPE {name} counter");
        for ((verb, resource), asked) in &state.requests {
            let _ = writeln!(text, "{name}{{verb=\"{verb}\",resource=\"{resource}\"}} {}", asked.seconds);
        }
        let name = "elasticdl_operator_api_request_seconds_max";
        let _ = writeln!(text, "# HELP {name} The longest such wait.\n# TYPE {name} gauge");
        for ((verb, resource), asked) in &state.requests {
            let _ = writeln!(text, "{name}{{verb=\"{verb}\",resource=\"{resource}\"}} {}", asked.longest);
        }
        text
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Requests of one kind.
#[derive(Debug, Default)]
struct Asked {
    count: u64,
    seconds: f64,
    longest: f64,
}

/// Measures what goes through it.
struct Timed<S> {
    inner: S,
    metrics: Arc<Metrics>,
}

impl<S> Service<Request<Body>> for Timed<S>
where
    S: Service<Request<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let uri = request.uri();
        let what = asked(request.method().as_str(), uri.path(), uri.query().unwrap_or_default());
        let (metrics, began) = (Arc::clone(&self.metrics), Instant::now());
        let told = move |answer| {
            metrics.answered(what, began.elapsed());
            answer
        };
        self.inner.call(request).map(told).boxed()
    }
}

/// How many took how long.
#[derive(Debug, Default, PartialEq)]
struct Histogram {
    /// Below each bound and above the one before.
    counts: [u64; BOUNDS.len()],
    count: u64,
    sum: f64,
    longest: f64,
}

impl Histogram {
    fn add(&mut self, seconds: f64) {
        if let Some(bucket) = BOUNDS.iter().position(|bound| seconds <= *bound) {
            self.counts[bucket] += 1;
        }
        self.count += 1;
        self.sum += seconds;
        self.longest = self.longest.max(seconds);
    }

    fn write(&self, text: &mut String, name: &str, written: &str) {
        let mut below = 0;
        for (bound, count) in BOUNDS.iter().zip(&self.counts) {
            below += count;
            let _ = writeln!(text, "{name}_bucket{{written=\"{written}\",le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(text, "{name}_bucket{{written=\"{written}\",le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(text, "{name}_sum{{written=\"{written}\"}} {}", self.sum);
        let _ = writeln!(text, "{name}_count{{written=\"{written}\"}} {}", self.count);
    }
}

/// A request as rights are given: its verb and its resource.
fn asked(method: &str, path: &str, query: &str) -> (&'static str, String) {
    let mut parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    // api/v1/… or apis/GROUP/VERSION/…
    let root = if parts.first() == Some(&"apis") { 3 } else { 2 };
    parts.drain(..root.min(parts.len()));
    if parts.first() == Some(&"namespaces") && parts.len() > 2 {
        parts.drain(..2);
    }
    let resource = match parts[..] {
        [] => String::new(),
        [resource, _, below] => format!("{resource}/{below}"),
        [resource, ..] => resource.to_owned(),
    };
    let watches = query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1"));
    let verb = match method {
        "GET" if watches => "watch",
        "GET" if parts.len() > 1 => "get",
        "GET" => "list",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => "other",
    };
    (verb, resource)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_as_rights_are_given() {
        for (method, path, query, verb, resource) in [
            ("GET", "/api/v1/namespaces/ns/pods", "labelSelector=a", "list", "pods"),
            ("GET", "/api/v1/pods", "watch=true&labelSelector=a", "watch", "pods"),
            ("GET", "/api/v1/namespaces/ns/secrets/s", "", "get", "secrets"),
            ("POST", "/api/v1/namespaces/ns/pods", "", "create", "pods"),
            ("DELETE", "/api/v1/namespaces/ns/pods/p", "", "delete", "pods"),
            ("GET", "/api/v1/namespaces/ns", "", "get", "namespaces"),
            (
                "PATCH",
                "/apis/elasticdl.org/v1/namespaces/ns/elasticjobs/j/status",
                "force=true",
                "patch",
                "elasticjobs/status",
            ),
        ] {
            assert_eq!(asked(method, path, query), (verb, resource.to_owned()), "{method} {path}?{query}");
        }
    }

    #[test]
    fn a_look_is_measured_from_the_first_thing_seen_and_again_after_a_failure() {
        let metrics = Metrics::default();
        let job = Key { namespace: "ns".into(), name: "j".into() };
        metrics.seen(&job);
        let first = metrics.begins(&job);
        metrics.seen(&job);
        metrics.fails(&job, first);
        assert_eq!(metrics.begins(&job), first, "it was not dealt with");
        metrics.ends(&job, first, Some(first + Duration::from_millis(200)), Some(Duration::ZERO));
        let due = metrics.begins(&job);
        assert!(due > first && due <= Instant::now());
        metrics.ends(&job, due, None, Some(Duration::from_secs(60)));
        let early = metrics.begins(&job);
        assert!(early >= due, "a look before its time was not late: {early:?}");
        let text = metrics.text();
        assert!(text.contains("elasticdl_operator_looks_failed_total 1\n"), "{text}");
        assert!(text.contains("elasticdl_operator_look_seconds_sum{written=\"true\"} 0.2\n"), "{text}");
    }

    #[test]
    fn buckets_add_up() {
        let mut histogram = Histogram::default();
        [0.003, 0.2, 0.2, 0.9, 45.0].into_iter().for_each(|seconds| histogram.add(seconds));
        let mut text = String::new();
        histogram.write(&mut text, "look", "true");
        for line in [
            "look_bucket{written=\"true\",le=\"0.1\"} 1",
            "look_bucket{written=\"true\",le=\"0.25\"} 3",
            "look_bucket{written=\"true\",le=\"1\"} 4",
            "look_bucket{written=\"true\",le=\"30\"} 4",
            "look_bucket{written=\"true\",le=\"+Inf\"} 5",
            "look_count{written=\"true\"} 5",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }
}
