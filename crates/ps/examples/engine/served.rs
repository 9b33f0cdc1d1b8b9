//! One server and one worker in one process, with real sockets and frames: pulls and pushes, plain and with TLS, beside
//! raw TCP and Redis.

#![expect(
    clippy::disallowed_methods,
    reason = "a benchmark reads the clock, and its certificate is of today"
)]

use std::error::Error;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use elasticdl_ps::server::{Options, Server};
use elasticdl_ps::{Model, Partition, Partitions};
use elasticdl_spec::{LeaseId, ModelShape, OptimizerSpec, PartitionId, TaskId};
use elasticdl_wire::connection::Who;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, PullMode, PushHeader, Status, kind};
use elasticdl_wire::{Identity, Stream, Token};
use serde_json::{Value, json};

use crate::memory::ADAGRAD;
use crate::raw::Raw;
use crate::redis::{Redis, VALUE_BYTES};
use crate::table::{BATCH, BATCHES, Dealt, PARTITIONS, batches, deal, id, ids, median, shape};

const TOKEN: &str = "engine-0123456789";
pub const ROWS: usize = 1_000_000;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What one round measures, in rows a second.
#[derive(Clone, Copy)]
struct Round {
    pull: f64,
    /// As many bytes over a connection and nothing else.
    raw: f64,
    tls: f64,
    push: f64,
    tls_push: f64,
    redis: Option<f64>,
}

/// Batches of so many rows of this dim, over loopback, in turn with its peers, so many times.
pub fn run(pairs: usize, dim: usize, rows: usize, redis: Option<&str>) -> Result<Value> {
    let (_, partitions) = hold(dim, ADAGRAD);
    let identity = Identity::make(SystemTime::now())?;
    let (_plain_server, mut plain) = serve(&partitions, None)?;
    let (_tls_server, mut tls) = serve(&partitions, Some(&identity))?;
    let row_bytes = dim * 4;
    let mut raw = Raw::connect(BATCH * row_bytes)?;
    let ids: Vec<Vec<u64>> = batches(rows).iter().map(|rows| ids(rows)).collect();
    let dealt: Vec<Dealt> = ids.iter().map(|ids| deal(ids)).collect();
    let mut redis = redis.map(|address| filled(address, row_bytes, rows)).transpose()?;

    // The first time rows are born and buffers grow.
    let mut tasks = 0..;
    let mut next = || tasks.next().expect("there are more tasks than rounds");
    for client in [&mut plain, &mut tls] {
        client.pull(&dealt, dim)?;
        client.push(&dealt, dim, next())?;
    }
    raw.receive(BATCH * BATCHES * row_bytes)?;
    let mut rounds = Vec::new();
    for _ in 0..pairs {
        let pull = plain.pull(&dealt, dim)?;
        let raw = raw.receive(BATCH * BATCHES * row_bytes)? / row_bytes as f64;
        let redis = redis.as_mut().map(|redis| redis.pull(&ids)).transpose()?;
        let tls_pull = tls.pull(&dealt, dim)?;
        let (push, tls_push) = (plain.push(&dealt, dim, next())?, tls.push(&dealt, dim, next())?);
        rounds.push(Round { pull, raw, tls: tls_pull, push, tls_push, redis });
    }
    let version = redis.as_mut().map(Redis::version).transpose()?;
    Ok(told(&rounds, json!({ "rows": rows, "dim": dim, "partitions": PARTITIONS, "redis_version": version })))
}

/// Adds medians to what is known already, and what they are of.
fn told(rounds: &[Round], mut known: Value) -> Value {
    let of = |f: &dyn Fn(&Round) -> Option<f64>| {
        let values: Vec<f64> = rounds.iter().filter_map(f).collect();
        if values.is_empty() { None } else { Some(median(values)) }
    };
    let millions = |f: &dyn Fn(&Round) -> Option<f64>| of(f).map(|rate| rate / 1e6);
    known["pairs"] = rounds.len().into();
    known["million_rows_per_second"] = json!({
        "pull": millions(&|r| Some(r.pull)), "push": millions(&|r| Some(r.push)), "tls": millions(&|r| Some(r.tls)),
        "tls_push": millions(&|r| Some(r.tls_push)), "raw": millions(&|r| Some(r.raw)), "redis": millions(&|r| r.redis),
    });
    // Every round, because the clock also counts what neighbours do.
    known["rounds"] =
        rounds.iter().map(|r| json!([r.pull, r.raw, r.tls, r.push, r.tls_push, r.redis])).collect();
    known["pull_of_raw"] = json!(of(&|r| Some(r.pull / r.raw)));
    known["pull_of_redis"] = json!(of(&|r| r.redis.map(|redis| r.pull / redis)));
    known["tls_of_pull"] = json!(of(&|r| Some(r.tls / r.pull)));
    known["push_of_raw"] = json!(of(&|r| Some(r.push / r.raw)));
    known["tls_of_push"] = json!(of(&|r| Some(r.tls_push / r.push)));
    known
}

/// All partitions of a model with one table, empty.
pub fn hold(dim: usize, optimizer: OptimizerSpec) -> (Arc<Model>, Arc<Partitions>) {
    let model_shape = ModelShape { tables: vec![shape(dim)], tensors: vec![] };
    let model = Arc::new(Model::new("engine", model_shape, optimizer, 7, PARTITIONS));
    let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
    for id in (0..PARTITIONS).map(PartitionId) {
        partitions.open(Partition::new(Arc::clone(&model), id, 1));
    }
    (model, partitions)
}

/// A Redis with a value for every row.
fn filled(address: &str, row_bytes: usize, rows: usize) -> Result<Redis> {
    if row_bytes != VALUE_BYTES {
        return Err(format!("Redis is compared with rows of {VALUE_BYTES} bytes only").into());
    }
    let mut redis = Redis::connect(address)?;
    redis.fill((0..rows as u64).map(id))?;
    Ok(redis)
}

/// A server, and a worker that has been welcomed.
fn serve(partitions: &Arc<Partitions>, identity: Option<&Identity>) -> Result<(Server, Client)> {
    let (listener, token) = (TcpListener::bind("127.0.0.1:0")?, Token::new(TOKEN)?);
    let server =
        Server::start(listener, token, identity.cloned(), Arc::clone(partitions), Options::default())?;
    let tcp = TcpStream::connect(server.address())?;
    tcp.set_nodelay(true)?;
    let mut client = Client { stream: Stream::connected(tcp, identity)?, frame: Frame::default() };
    while let Err(error) = client.stream.handshake() {
        if error.kind() != ErrorKind::Interrupted {
            return Err(error.into());
        }
    }
    ps::hello(&mut client.frame, TOKEN, Who::Worker(0));
    client.call(kind::WELCOME)?;
    Ok((server, client))
}

/// A worker's end of a connection.
struct Client {
    stream: Stream,
    frame: Frame,
}

impl Client {
    /// Rows a second.
    fn pull(&mut self, batches: &[Dealt], dim: usize) -> Result<f64> {
        let start = Instant::now();
        for parts in batches {
            let frame = &mut self.frame;
            ps::begin_pull(frame, 1, PullMode { births: true, tensors: true }, parts.len());
            for (ids, id) in parts.iter().zip(0..) {
                ps::put_part(frame, PartitionId(id), 1);
                ps::put_ids(frame, ids);
            }
            self.call(kind::PULLED)?;
            assert!(self.frame.bytes() >= BATCH * dim * 4, "all rows have come");
        }
        Ok((batches.len() * BATCH) as f64 / start.elapsed().as_secs_f64())
    }

    /// Rows a second. Every time it is another task's batches.
    fn push(&mut self, batches: &[Dealt], dim: usize, shard: u32) -> Result<f64> {
        let gradients = vec![1e-3f32; BATCH * dim];
        let start = Instant::now();
        for (batch, parts) in (0..).zip(batches) {
            let lease = LeaseId { term: 1, n: 1 };
            let task = TaskId::train(0, shard);
            let header = PushHeader { task, batch, lease, records: 4096, factor: 1.0 };
            let frame = &mut self.frame;
            ps::begin_push(frame, 1, header, parts.len());
            for (ids, id) in parts.iter().zip(0..) {
                ps::put_part(frame, PartitionId(id), 1);
                frame.put(0);
                ps::put_ids(frame, ids);
                frame.put_floats(&gradients[..ids.len() * dim]);
            }
            self.call(kind::PUSHED)?;
            let answers = ps::take_answers(self.frame.payload())?;
            assert!(answers.iter().all(|answer| answer.status == Status::Ok), "all pushes count");
        }
        Ok((batches.len() * BATCH) as f64 / start.elapsed().as_secs_f64())
    }

    fn call(&mut self, due: u32) -> Result<()> {
        let request = self.frame.request();
        self.frame.write(&mut self.stream)?;
        self.frame.read(&mut self.stream, Limits::default())?;
        Ok(ps::expect(&self.frame, due, request)?)
    }
}
