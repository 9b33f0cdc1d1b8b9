//! One server and one worker in one process, with real sockets and frames: pulls, pushes, a checkpoint.

#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::error::Error;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use elasticdl_ps::server::{Options, Server};
use elasticdl_ps::{Model, Partition, Partitions, checkpoint};
use elasticdl_spec::{LeaseId, ModelShape, PartitionId, TaskId};
use elasticdl_wire::Token;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, PullMode, PushHeader, kind};
use serde_json::{Value, json};

use crate::memory::ADAGRAD;
use crate::table::{BATCH, Dealt, PARTITIONS, batches, deal, ids, shape};

const TOKEN: &str = "engine-0123456789";
pub const ROWS: usize = 1_000_000;

/// Batches of so many rows of this dim, over loopback.
pub fn run(dim: usize, rows: usize) -> Result<Value, Box<dyn Error>> {
    let model_shape = ModelShape { tables: vec![shape(dim)], tensors: vec![] };
    let model = Arc::new(Model::new("engine", model_shape, ADAGRAD, 7, PARTITIONS));
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

    let batches: Vec<Dealt> = batches(rows).iter().map(|rows| deal(&ids(rows))).collect();
    // The first time rows are born.
    pull(&mut frame, &mut stream, &batches)?;
    let pulled = pull(&mut frame, &mut stream, &batches)?;
    let pushed = push(&mut frame, &mut stream, &batches, dim)?;
    Ok(json!({
        "rows": rows, "dim": dim, "partitions": PARTITIONS,
        "million_rows_per_second": { "pull": pulled, "push": pushed },
        "gigabytes_per_second": { "pull": pulled * dim as f64 * 4e-3, "push": pushed * dim as f64 * 4e-3 },
        "checkpoint": checkpointed(&model, &partitions)?,
    }))
}

/// Million rows a second.
fn pull(frame: &mut Frame, stream: &mut TcpStream, batches: &[Dealt]) -> Result<f64, Box<dyn Error>> {
    let start = Instant::now();
    for parts in batches {
        ps::begin_pull(frame, 1, PullMode { births: true, tensors: true }, parts.len());
        for (ids, id) in parts.iter().zip(0..) {
            ps::put_part(frame, PartitionId(id), 1);
            ps::put_ids(frame, ids);
        }
        call(frame, stream, kind::PULLED)?;
    }
    Ok((batches.len() * BATCH) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// Million rows a second.
fn push(
    frame: &mut Frame,
    stream: &mut TcpStream,
    batches: &[Dealt],
    dim: usize,
) -> Result<f64, Box<dyn Error>> {
    let gradients = vec![1e-3f32; BATCH * dim];
    let start = Instant::now();
    for (batch, parts) in (0..).zip(batches) {
        let lease = LeaseId { term: 1, n: 1 };
        let header = PushHeader { task: TaskId::train(0, 0), batch, lease, records: 4096, factor: 1.0 };
        ps::begin_push(frame, 1, header, parts.len());
        for (ids, id) in parts.iter().zip(0..) {
            ps::put_part(frame, PartitionId(id), 1);
            frame.put(0);
            ps::put_ids(frame, ids);
            frame.put_floats(&gradients[..ids.len() * dim]);
        }
        call(frame, stream, kind::PUSHED)?;
    }
    Ok((batches.len() * BATCH) as f64 / start.elapsed().as_secs_f64() / 1e6)
}

fn checkpointed(model: &Arc<Model>, partitions: &Partitions) -> Result<Value, Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("engine-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let start = Instant::now();
    let written = partitions.write_checkpoint(&dir)?;
    let (seconds, bytes) = (start.elapsed().as_secs_f64(), written.iter().map(|w| w.sum.bytes).sum::<u64>());
    let start = Instant::now();
    for file in &written {
        checkpoint::restore(model, &dir, file.partition, 2, file.sum)?;
    }
    let restored = start.elapsed().as_secs_f64();
    std::fs::remove_dir_all(&dir)?;
    let megabytes = bytes as f64 / 1e6;
    Ok(json!({
        "megabytes": megabytes, "written_per_second": megabytes / seconds, "restored_per_second": megabytes / restored,
    }))
}

fn call(frame: &mut Frame, stream: &mut TcpStream, due: u32) -> Result<(), Box<dyn Error>> {
    let request = frame.request();
    frame.write(stream)?;
    frame.read(stream, Limits::default())?;
    Ok(ps::expect(frame, due, request)?)
}
