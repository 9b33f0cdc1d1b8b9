//! What a worker costs beside its model: `cargo bench -p elasticdl-worker --profile dev`.
//!
//! Batches of 4096 records with 26 ids each, about 40k of them unique, rows of 17 floats. The model does
//! nothing and the server looks nothing up, so what is left is this crate and the sockets. Times are of the
//! thread's own CPU where it says so: other work on the machine does not change them.
#![expect(clippy::disallowed_methods, reason = "measures time")]

#[path = "rates/ids.rs"]
mod ids;

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_data::{BadRecord, Batch};
use elasticdl_nn::{Gradients, Input, Model};
use elasticdl_spec::mix::Rng;
use elasticdl_spec::shape::RowPart;
use elasticdl_spec::{
    Initializer, LeaseId, ModelShape, PartitionId, Shard, TableShape, TaskId, TensorShape, placement,
};
use elasticdl_wire::Token;
use elasticdl_wire::frame::{Frame, Limits};
use elasticdl_wire::ps::{self, Answer, Status, kind};

use elasticdl_worker::gauges::{Gauges, Stage};
use elasticdl_worker::pipeline::{Config, Event, Pipeline};
use elasticdl_worker::ps_client::{self, Directory, Place, Places, PsClient};
use elasticdl_worker::source::{Source, Stream};
use elasticdl_worker::stop::Stop;
use elasticdl_worker::task::{Claim, Leased, LeasedTask};
use ids::{FIELDS, RECORDS, ids};

const NUMBERS: usize = 13;
const PARTITIONS: u32 = 8;
const BATCHES: u64 = 300;
const TOKEN: &str = "0123456789abcdef";

fn main() {
    for (name, hidden) in [("deepfm 16-4", vec![16, 4]), ("deepfm 400-400-400", vec![400, 400, 400])] {
        for threads in [1, 2] {
            pipeline(name, &hidden, threads);
        }
    }
}

/// Milliseconds of CPU this process has used.
fn cpu_of_process() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux has it");
    // User and system time, in hundredths of a second, after the name in parentheses.
    let fields = stat.rsplit(')').next().unwrap_or_default().split(' ');
    fields.skip(12).take(2).filter_map(|n| n.parse::<f64>().ok()).sum::<f64>() * 10.0
}

fn pipeline(name: &str, hidden: &[usize], threads: usize) {
    let shape = Arc::new(shape(hidden));
    let addresses: Vec<String> = (0..2).map(|_| serve(&shape)).collect();
    let stop = Stop::default();
    let client = ps_client::Config {
        shape: Arc::clone(&shape),
        tables: elasticdl_spec::TablesSpec::default(),
        partitions: PARTITIONS,
        directory: Arc::new(Directory::new(PARTITIONS, Box::new(Fixed(addresses)))),
        token: Token::new(TOKEN).expect("long enough"),
        identity: None,
        worker: 0,
        staged: false,
        stop: stop.clone(),
    };
    let gauges = Arc::new(Gauges::default());
    let (events, mut happening) = tokio::sync::mpsc::unbounded_channel();
    let mut rng = Rng::new(5);
    let batches = (0..8).map(|_| ids(&mut rng)).collect();
    let model = || Box::new(Nothing(ModelShape::clone(&shape))) as Box<dyn Model>;
    let stages = Pipeline::start(Config {
        shape: Arc::clone(&shape),
        partitions: PARTITIONS,
        depth: 4,
        together: elasticdl_worker::pipeline::Together::Freely,
        read_ahead: 8,
        bad_records_max: 0,
        schedule: elasticdl_spec::Schedule::default(),
        clip: elasticdl_spec::job::ClipSpec::default(),
        models: (0..threads).map(|_| model()).collect(),
        source: Box::new(Memory { batches: Arc::new(batches) }),
        pulls: Box::new(PsClient::new(client.clone())),
        pushes: Box::new(PsClient::new(client)),
        stop,
        gauges: Arc::clone(&gauges),
        events,
    })
    .expect("threads can be had");
    let shard = Shard { path: String::new(), first: 0, records: None, offset: 0, fingerprint: 0 };
    let claim = Claim { task: TaskId::train(0, 0), lease: LeaseId { term: 1, n: 1 } };
    stages.give(Arc::new(LeasedTask::new(Leased::new(claim, shard))));
    let (start, used) = (Instant::now(), cpu_of_process());
    loop {
        match happening.blocking_recv().expect("the stages run") {
            Event::Ended { .. } => break,
            Event::Broken(error) => panic!("{error}"),
            _ => {}
        }
    }
    let (wall, used) = (start.elapsed().as_secs_f64(), cpu_of_process() - used);
    stages.join();
    let each = |stage| format!("{:.2}", gauges.seconds(stage) * 1e3 / BATCHES as f64);
    println!(
        "{name}, {threads} compute threads: {:.2} ms a batch, {:.2} ms of CPU with the servers'; reading {}, pulling {}, computing {}, pushing {} ms",
        wall * 1e3 / BATCHES as f64,
        used / BATCHES as f64,
        each(Stage::Reading),
        each(Stage::Pulling),
        each(Stage::Computing),
        each(Stage::Pushing),
    );
}

/// The tables and tensors of a DeepFM of dimension 16.
fn shape(hidden: &[usize]) -> ModelShape {
    let init = Initializer::Zeros;
    let mut tensors = vec![];
    let mut inputs = FIELDS * 16 + NUMBERS;
    for (i, &width) in hidden.iter().enumerate() {
        tensors.push(TensorShape { name: format!("deep.{i}.weight"), shape: vec![inputs, width], init });
        inputs = width;
    }
    let parts = vec![RowPart { width: 17, init }];
    ModelShape { tables: vec![TableShape { name: "embedding".into(), parts }], tensors }
}

/// A model that is infinitely fast.
struct Nothing(ModelShape);

impl Model for Nothing {
    fn shape(&self) -> &ModelShape {
        &self.0
    }

    fn load(&mut self, _: &[&[f32]]) {}

    fn train(&mut self, _: &Input, _: usize, _: &mut Gradients) -> f64 {
        0.0
    }

    fn predict(&mut self, _: &Input, _: &mut Vec<f32>) {}
}

/// Batches that are in memory already.
struct Memory {
    batches: Arc<Vec<Vec<u64>>>,
}

struct MemoryStream {
    batches: Arc<Vec<Vec<u64>>>,
    next: u64,
}

impl Source for Memory {
    fn open(&mut self, _: &LeasedTask) -> elasticdl_data::Result<Box<dyn Stream>> {
        Ok(Box::new(MemoryStream { batches: Arc::clone(&self.batches), next: 0 }))
    }
}

impl Stream for MemoryStream {
    fn next(&mut self) -> elasticdl_data::Result<Option<(u64, Batch, Vec<BadRecord>)>> {
        let index = self.next;
        self.next += 1;
        let ids = self.batches[index as usize % self.batches.len()].clone();
        let batch = Batch {
            records: RECORDS,
            labels: vec![0.0; RECORDS],
            numeric: vec![0.0; RECORDS * NUMBERS],
            ids,
        };
        Ok((index < BATCHES).then_some((index, batch, vec![])))
    }
}

/// Partitions dealt to servers in turn, for ever.
struct Fixed(Vec<String>);

impl Places for Fixed {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        let address = |p: u32| self.0[p as usize % self.0.len()].clone();
        let place = |p| (PartitionId(p), Place { incarnation: 1, address: address(p) });
        Ok((0..PARTITIONS).map(place).collect())
    }
}

/// A server that answers at once, with zeros.
fn serve(shape: &Arc<ModelShape>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback is there");
    let address = listener.local_addr().expect("it is bound").to_string();
    let shape = Arc::clone(shape);
    let accept = move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let shape = Arc::clone(&shape);
            // The connection ends with the client.
            start(move || drop(answer(stream, &shape)));
        }
    };
    start(accept);
    address
}

fn start(body: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().name("server".into()).spawn(body).expect("threads can be had");
}

fn answer(mut stream: TcpStream, shape: &ModelShape) -> elasticdl_wire::Result<()> {
    let failed = |e| elasticdl_wire::Error::io("answering", e);
    stream.set_nodelay(true).map_err(failed)?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).map_err(failed)?;
    let (mut request, mut reply) = (Frame::default(), Frame::default());
    while request.read(&mut stream, Limits::default())? {
        let mut payload = request.payload();
        match request.kind() {
            kind::PULL => {
                let (_, parts) = ps::take_pull(&mut payload)?;
                reply.begin(kind::PULLED, request.request());
                reply.put(parts as u64);
                for _ in 0..parts {
                    let (partition, _) = ps::take_part(&mut payload)?;
                    reply.put_all(&[u64::from(partition.0), Status::Ok.word(), 0]);
                    reply.grow_floats(ps::take_ids(&mut payload)?.len() * 17);
                    for tensor in &shape.tensors {
                        if placement::partition_of_tensor(&tensor.name, PARTITIONS) == partition {
                            reply.grow_floats(tensor.len());
                        }
                    }
                }
            }
            kind::PUSH => {
                let (_, parts) = ps::take_push(&mut payload)?;
                let mut answers = vec![];
                for _ in 0..parts {
                    let (partition, _) = ps::take_part(&mut payload)?;
                    payload.take()?;
                    let ids = ps::take_ids(&mut payload)?.len();
                    payload.take_floats(ids * 17)?;
                    for tensor in &shape.tensors {
                        if placement::partition_of_tensor(&tensor.name, PARTITIONS) == partition {
                            payload.take_floats(tensor.len())?;
                        }
                    }
                    answers.push(ok(partition));
                }
                ps::answers(&mut reply, kind::PUSHED, request.request(), &answers);
            }
            kind::FENCE => {
                let (_, _, parts) = ps::take_fence(&mut payload)?;
                let mut answers = vec![];
                for _ in 0..parts {
                    answers.push(ok(ps::take_part(&mut payload)?.0));
                }
                ps::answers(&mut reply, kind::FENCED, request.request(), &answers);
            }
            _ => reply.begin(kind::WELCOME, request.request()),
        }
        reply.write(&mut stream).map_err(failed)?;
    }
    Ok(())
}

fn ok(partition: PartitionId) -> Answer {
    Answer { partition, status: Status::Ok, mark: 0, version: 0 }
}
