//! `operator`: looks after the jobs that are resources of a cluster.

use std::fs;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elasticdl_master::status::{Phase, Status, StopRequest, Wanted};
use elasticdl_operator::cluster::Cluster;
use elasticdl_operator::lease::Lead;
use elasticdl_operator::manifest::Secrets;
use elasticdl_operator::metrics::Metrics;
use elasticdl_operator::report::{Masters, Report};
use elasticdl_operator::{Error, controller, crd, deploy, resource};
use elasticdl_wire::{Identity, Token};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::args::{Crd, Operator, OperatorFiles};
use crate::client::Client;
use crate::fault::{Exit, Fault};
use crate::{print, tether, wait};

/// Requests for metrics are short, and are there at once.
const REQUEST_MAX: usize = 4096;
const REQUEST_TIME: Duration = Duration::from_secs(2);

/// `operator`, or the files that it needs.
pub fn command(args: Operator) -> anyhow::Result<Exit> {
    match &args.files {
        Some(OperatorFiles::Crd(crd)) => files(crd),
        None => wait(operate(args)),
    }
}

fn files(args: &Crd) -> anyhow::Result<Exit> {
    match &args.out {
        Some(dir) => {
            fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
            for (name, text) in deploy::files() {
                let path = dir.join(name);
                fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
            }
        }
        None if args.crd_only => print::line(deploy::yaml(&[crd::definition()]).trim_end())?,
        None => print::line(deploy::all().trim_end())?,
    }
    Ok(Exit::Done)
}

async fn operate(args: Operator) -> anyhow::Result<Exit> {
    let metrics = Arc::new(Metrics::default());
    let counted = Arc::clone(&metrics);
    let reach = move |config| counted.client(config);
    let cluster = Cluster::find_with(args.context.as_deref(), args.lease_namespace.as_deref(), reach).await;
    let cluster = cluster.map_err(tether::api)?;
    let end = ended()?;
    if let Some(listen) = args.metrics {
        let listener = TcpListener::bind(listen).await.map_err(|e| {
            let hint = "use an address of this machine and a port that is free, such as 127.0.0.1:9100";
            Fault::user(format!("no metrics can be told at {listen}")).because(e).hint(hint)
        })?;
        tokio::spawn(tell(listener, Arc::clone(&metrics)));
    }
    let namespace = (args.namespace != "all").then_some(args.namespace);
    let lead = match args.leader_elect {
        true => {
            let mut early = end.clone();
            tokio::select! {
                lead = Lead::gain(cluster.client(), &cluster.namespace, identity()) => Some(lead),
                _ = early.wait_for(|ended| *ended) => return Ok(Exit::Done),
            }
        }
        false => None,
    };
    let mut until = end.clone();
    let ended = async move {
        let _ = until.wait_for(|ended| *ended).await;
    };
    let (client, masters) = (cluster.client(), Arc::new(Http));
    let working = controller::run(client, namespace.as_deref(), masters, metrics, ended);
    let lost = async {
        match &lead {
            Some(lead) => lead.keep().await,
            None => pending().await,
        }
    };
    tokio::select! {
        outcome = working => outcome.map_err(explained)?,
        // Another one leads, or may soon: whatever is under way here must not go on.
        () = lost => return Err(Fault::job("this operator does not lead any more: its lease could not be renewed").into()),
    }
    if let Some(lead) = lead {
        lead.release().await;
    }
    Ok(Exit::Done)
}

/// Answers every request with the metrics, and takes nothing from anybody.
async fn tell(listener: TcpListener, metrics: Arc<Metrics>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let text = metrics.text();
        tokio::spawn(async move {
            let mut request = [0; REQUEST_MAX];
            // Whoever asks says what in one piece, and there is but one answer.
            let _ = tokio::time::timeout(REQUEST_TIME, stream.read(&mut request)).await;
            let kind = "text/plain; version=0.0.4";
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                text.len()
            );
            let _ = stream.write_all((head + &text).as_bytes()).await;
            let _ = stream.shutdown().await;
        });
    }
}

/// Becomes true with SIGTERM or Ctrl-C.
fn ended() -> anyhow::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let (tell, ended) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _ = tell.send(true);
    });
    Ok(ended)
}

/// What tells this process apart from all others that may lead.
fn identity() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = std::env::var("POD_NAME").unwrap_or(host);
    let started = crate::process::started(std::process::id()).unwrap_or_default();
    format!("{name}_{}_{started}", std::process::id())
}

fn explained(error: Error) -> anyhow::Error {
    let missing = matches!(&error, Error::Api { source, .. } if matches!(&**source, kube::Error::Api(status) if status.code == 404));
    match missing {
        true => Fault::user("the cluster does not know ElasticJobs")
            .hint("install them: elasticdl operator crd | kubectl apply -f -")
            .into(),
        false => tether::api(error),
    }
}

/// Masters are called over HTTP, with the job's token and certificate.
struct Http;

impl Masters for Http {
    fn report(&self, address: &str, secrets: &Secrets) -> Result<Report, String> {
        let status = client(address, secrets).and_then(|client| client.status());
        status.map(report).map_err(|e| format!("{e:#}"))
    }

    fn scale(&self, address: &str, secrets: &Secrets, workers: u32) -> Result<(), String> {
        client(address, secrets)
            .and_then(|client| client.scale(Wanted::Fixed(workers).into()))
            .map_err(|e| format!("{e:#}"))
    }

    fn allow(&self, address: &str, secrets: &Secrets, workers: Option<u32>) -> Result<(), String> {
        client(address, secrets).and_then(|client| client.allow(workers)).map_err(|e| format!("{e:#}"))
    }

    fn stop(&self, address: &str, secrets: &Secrets) -> Result<(), String> {
        let stop = |client: Client| client.stop(StopRequest { now: false });
        client(address, secrets).and_then(stop).map_err(|e| format!("{e:#}"))
    }
}

fn client(address: &str, secrets: &Secrets) -> anyhow::Result<Client> {
    let token = Token::new(&secrets.token).map_err(|e| anyhow::anyhow!(e))?;
    let [ca, cert, key] = secrets.tls.clone();
    Client::new(address, &token, Some(&Identity::from_pem(ca, cert, key)?))
}

fn report(status: Status) -> Report {
    let runs = |state: &str| matches!(state, "working" | "idle" | "draining" | "running");
    Report {
        phase: match status.phase {
            Phase::Starting => resource::Phase::Starting,
            Phase::Training => resource::Phase::Training,
            Phase::Running => resource::Phase::Running,
            Phase::Saving => resource::Phase::Saving,
            Phase::Evaluating => resource::Phase::Evaluating,
            Phase::Stopping => resource::Phase::Stopping,
            // Over when the master has ended, and not while it says its last words.
            Phase::Done | Phase::Failed | Phase::Stopped => resource::Phase::Saving,
        },
        records: status.records,
        records_total: status.records_total,
        epoch: status.program.is_none().then_some(status.epoch + 1),
        workers: status.workers.iter().filter(|worker| runs(&worker.state)).count() as u32,
        workers_wanted: status.workers_wanted,
        workers_useful: Some(status.workers_useful),
        workers_allowed: status.workers_allowed,
        auc: status.auc,
        logloss: status.logloss,
        error: status.error,
    }
}
