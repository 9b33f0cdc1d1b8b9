//! How fast the engine is: rows born, pulled and pushed on one core, the same over loopback, checkpoints.
//!
//! `cargo run --release -p elasticdl-ps --example engine -- [rows] [dim]`

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::error::Error;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use elasticdl_ps::server::{Options, Server};
use elasticdl_ps::{Model, Optimizer, Partition, Partitions, Table, checkpoint};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::placement::partition_of_row;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{Initializer, LeaseId, ModelShape, OptimizerSpec, PartitionId, TableShape, TaskId};
use elasticdl_wire::Token;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, PullMode, PushHeader, kind};

/// Ids in one call, about as many as a batch of 4,096 records with 26 fields has after deduplication.
const BATCH: usize = 40_000;
const BATCHES: usize = 50;
const ROUNDS: usize = 5;
const PARTITIONS: u32 = 16;
const TOKEN: &str = "engine-0123456789";

const RULES: [(&str, OptimizerSpec); 3] = [
    ("sgd", OptimizerSpec::Sgd { learning_rate: 0.01 }),
    ("adagrad", OptimizerSpec::Adagrad { learning_rate: 0.01, initial_accumulator: 0.1, epsilon: 1e-10 }),
    ("adam", OptimizerSpec::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }),
];

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(|a| a.parse::<usize>());
    let sizes = arguments.next().transpose()?.map_or(vec![100_000, 1_000_000, 16_000_000], |n| vec![n]);
    let dims = arguments.next().transpose()?.map_or(vec![8, 16, 17, 64], |d| vec![d]);
    println!("million rows per second of one core, best of {ROUNDS} rounds, batches of {BATCH} uniform ids");
    println!(
        "{:>10} {:>4} {:<8} {:>6} {:>6} {:>6} {:>9}",
        "rows", "dim", "rule", "born", "pull", "push", "bytes/row"
    );
    for rows in &sizes {
        for dim in &dims {
            for (name, spec) in RULES {
                if rows * dim <= 256_000_000 {
                    in_process(*rows, *dim, name, spec);
                }
            }
        }
    }
    println!(
        "\nover loopback, one connection, {PARTITIONS} partitions, adagrad; checkpoint to a temporary directory"
    );
    for dim in &dims {
        served(sizes[0].min(1_000_000), *dim)?;
    }
    Ok(())
}

fn shape(dim: usize) -> TableShape {
    let init = Initializer::Uniform { bound: 0.01 };
    TableShape { name: "t".into(), parts: vec![RowPart { width: dim, init }] }
}

fn batches(rows: usize) -> Vec<Vec<u64>> {
    let mut rng = Rng::new(1);
    (0..BATCHES).map(|_| (0..BATCH).map(|_| rng.below(rows as u64)).collect()).collect()
}

fn in_process(rows: usize, dim: usize, name: &str, spec: OptimizerSpec) {
    let optimizer = Optimizer::new(spec);
    let mut table = Table::new(shape(dim), 7, &optimizer);
    let mut floats = vec![0.0f32; BATCH * dim];
    let all: Vec<u64> = (0..rows as u64).collect();
    let born = rate(rows, || {
        for ids in all.chunks(BATCH) {
            table.pull(ids, &mut floats[..ids.len() * dim]);
        }
    });
    let batches = batches(rows);
    let pull = best_rate(BATCH * BATCHES, || batches.iter().for_each(|ids| table.pull(ids, &mut floats)));
    floats.fill(1e-3);
    let push =
        best_rate(BATCH * BATCHES, || batches.iter().for_each(|ids| table.push(ids, &floats, &optimizer)));
    let bytes = table.bytes() as f64 / table.len() as f64;
    println!("{rows:>10} {dim:>4} {name:<8} {born:>6.1} {pull:>6.1} {push:>6.1} {bytes:>9.0}");
}

/// One server and one worker in one process, with real sockets and frames.
fn served(rows: usize, dim: usize) -> Result<(), Box<dyn Error>> {
    let model_shape = ModelShape { tables: vec![shape(dim)], tensors: vec![] };
    let model = Arc::new(Model::new("engine", model_shape, RULES[1].1, 7, PARTITIONS));
    let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
    for id in (0..PARTITIONS).map(PartitionId) {
        partitions.open(Partition::new(Arc::clone(&model), id, 1));
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let server =
        Server::start(listener, Token::new(TOKEN)?, None, Arc::clone(&partitions), Options::default())?;
    let mut stream = TcpStream::connect(server.address())?;
    stream.set_nodelay(true)?;
    let mut frame = Frame::default();
    ps::hello(&mut frame, TOKEN, 0);
    call(&mut frame, &mut stream, kind::WELCOME)?;

    let batches: Vec<Vec<Vec<u64>>> = batches(rows).iter().map(|ids| routed(ids)).collect();
    let gradients = vec![1e-3f32; BATCH * dim];
    let pull = |frame: &mut Frame, stream: &mut TcpStream, parts: &[Vec<u64>]| {
        ps::begin_pull(frame, 1, PullMode { births: true, tensors: true }, parts.len());
        for (ids, id) in parts.iter().zip(0..) {
            ps::put_part(frame, PartitionId(id), 1);
            ps::put_ids(frame, ids);
        }
        call(frame, stream, kind::PULLED)
    };
    for parts in &batches {
        pull(&mut frame, &mut stream, parts)?;
    }
    let pulls = Instant::now();
    for parts in &batches {
        pull(&mut frame, &mut stream, parts)?;
    }
    let pulled = (batches.len() * BATCH) as f64 / pulls.elapsed().as_secs_f64();
    let pushes = Instant::now();
    for (batch, parts) in (0..).zip(&batches) {
        let lease = LeaseId { term: 1, n: 1 };
        let header = PushHeader { task: TaskId::train(0, 0), batch, lease, records: 4096 };
        ps::begin_push(&mut frame, 1, header, parts.len());
        for (ids, id) in parts.iter().zip(0..) {
            ps::put_part(&mut frame, PartitionId(id), 1);
            frame.put(0);
            ps::put_ids(&mut frame, ids);
            frame.put_floats(&gradients[..ids.len() * dim]);
        }
        call(&mut frame, &mut stream, kind::PUSHED)?;
    }
    let pushed = (batches.len() * BATCH) as f64 / pushes.elapsed().as_secs_f64();
    let row_bytes = (dim * 4) as f64;
    println!(
        "dim {dim:>3}: pull {:>5.1} M rows/s ({:.2} GB/s), push {:>5.1} M rows/s ({:.2} GB/s), {}",
        pulled / 1e6,
        pulled * row_bytes / 1e9,
        pushed / 1e6,
        pushed * row_bytes / 1e9,
        checkpointed(&model, &partitions)?
    );
    Ok(())
}

fn checkpointed(model: &Arc<Model>, partitions: &Partitions) -> Result<String, Box<dyn Error>> {
    let dir = match std::env::var_os("ENGINE_CHECKPOINT") {
        Some(dir) => std::path::PathBuf::from(dir),
        None => std::env::temp_dir().join(format!("engine-{}", std::process::id())),
    };
    std::fs::create_dir_all(&dir)?;
    let start = Instant::now();
    let written = partitions.write_checkpoint(&dir)?;
    let (seconds, bytes) = (start.elapsed().as_secs_f64(), written.iter().map(|w| w.sum.bytes).sum::<u64>());
    let start = Instant::now();
    for file in &written {
        checkpoint::restore(model, &dir, file.partition, 2, file.sum)?;
    }
    let restored = start.elapsed().as_secs_f64();
    if std::env::var_os("ENGINE_CHECKPOINT").is_none() {
        std::fs::remove_dir_all(&dir)?;
    }
    let megabytes = bytes as f64 / 1e6;
    Ok(format!(
        "checkpoint of {megabytes:.0} MB: {:.0} MB/s written, {:.0} MB/s restored",
        megabytes / seconds,
        megabytes / restored
    ))
}

/// Ids by partition, as a worker sorts them.
fn routed(ids: &[u64]) -> Vec<Vec<u64>> {
    let mut parts = vec![Vec::new(); PARTITIONS as usize];
    ids.iter().for_each(|id| parts[partition_of_row(*id, PARTITIONS).0 as usize].push(*id));
    parts
}

fn call(frame: &mut Frame, stream: &mut TcpStream, due: u32) -> Result<(), Box<dyn Error>> {
    let request = frame.request();
    frame.write(stream)?;
    frame.read(stream, Limits::default())?;
    Ok(ps::expect(frame, due, request)?)
}

/// Million items per second of this thread's time on a core, so that busy neighbours count less.
fn rate(count: usize, mut work: impl FnMut()) -> f64 {
    let start = on_core_seconds();
    work();
    count as f64 / (on_core_seconds() - start) / 1e6
}

/// The best of some rounds.
fn best_rate(count: usize, mut work: impl FnMut()) -> f64 {
    (0..ROUNDS).map(|_| rate(count, &mut work)).fold(0.0, f64::max)
}

fn on_core_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|n| n.parse::<u64>().ok());
    nanoseconds.expect("the kernel tells how long a thread was on a core") as f64 / 1e9
}
