//! For tests: the world over frames, on loopback, with faults on demand.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use elasticdl_wire::frame::{Frame, Limits, Payload};
use elasticdl_wire::ps::{self, Answer, Status, kind};

use super::World;

/// What goes wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    None,
    /// The connection closes before the request is carried out.
    CloseBefore,
    /// The connection closes after the request was carried out, and nobody is told.
    CloseAfter,
    /// The partitions say they are not here.
    NotHere,
    /// The request is carried out, and the answer ends with a word that nobody asked for.
    Malformed,
}

/// A server of some partitions of a world.
pub(crate) struct FakeServer {
    pub address: String,
    shared: Arc<Shared>,
}

struct Shared {
    world: Arc<Mutex<World>>,
    token: String,
    faults: Mutex<VecDeque<Fault>>,
    /// Kinds of the frames that came, hello included.
    seen: Mutex<Vec<u32>>,
    ending: Mutex<bool>,
}

impl FakeServer {
    pub fn start(world: &Arc<Mutex<World>>, token: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            world: Arc::clone(world),
            token: token.into(),
            faults: Mutex::default(),
            seen: Mutex::default(),
            ending: Mutex::new(false),
        });
        let server = FakeServer { address, shared: Arc::clone(&shared) };
        let accept = move || {
            for stream in listener.incoming().map_while(std::result::Result::ok) {
                if *shared.ending.lock().unwrap() {
                    return;
                }
                let shared = Arc::clone(&shared);
                spawn(move || drop(serve(stream, &shared)));
            }
        };
        spawn(accept);
        server
    }

    /// The next requests meet these, one each.
    pub fn inject(&self, faults: &[Fault]) {
        self.shared.faults.lock().unwrap().extend(faults);
    }

    /// Kinds of the frames that came.
    pub fn seen(&self) -> Vec<u32> {
        self.shared.seen.lock().unwrap().clone()
    }
}

impl Drop for FakeServer {
    fn drop(&mut self) {
        *self.shared.ending.lock().unwrap() = true;
        // Wakes the one who accepts.
        let _ = TcpStream::connect(self.address.parse::<SocketAddr>().unwrap());
    }
}

fn spawn(body: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().name("fake-server".into()).spawn(body).unwrap();
}

fn serve(mut stream: TcpStream, shared: &Shared) -> elasticdl_wire::Result<()> {
    let (mut request, mut answer) = (Frame::default(), Frame::default());
    while request.read(&mut stream, Limits::default())? {
        shared.seen.lock().unwrap().push(request.kind());
        if request.kind() == kind::HELLO {
            if request.payload().take_text()? == shared.token {
                answer.begin(kind::WELCOME, 0);
            } else {
                ps::refused(&mut answer, 0, "wrong token");
            }
        } else {
            let fault = shared.faults.lock().unwrap().pop_front().unwrap_or(Fault::None);
            if fault == Fault::CloseBefore {
                return Ok(());
            }
            let mut world = shared.world.lock().unwrap();
            world.frame();
            carry_out(&request, &mut answer, &mut world, fault)?;
            match fault {
                Fault::CloseAfter => return Ok(()),
                Fault::Malformed => answer.put(u64::MAX),
                _ => {}
            }
        }
        answer.write(&mut stream).map_err(|e| elasticdl_wire::Error::io("answering", e))?;
    }
    Ok(())
}

fn carry_out(
    request: &Frame,
    answer: &mut Frame,
    world: &mut World,
    fault: Fault,
) -> elasticdl_wire::Result<()> {
    let mut payload = request.payload();
    match request.kind() {
        kind::PULL => pull(&mut payload, request.request(), answer, world, fault)?,
        kind::PUSH => {
            let (header, parts) = ps::take_push(&mut payload)?;
            let mut answers = vec![];
            for _ in 0..parts {
                let (p, incarnation) = ps::take_part(&mut payload)?;
                payload.take()?;
                let ids = ps::take_ids(&mut payload)?;
                let gradients = payload.take_floats(ids.len() * world.shape.tables[0].width())?;
                let mut tensors = vec![];
                for (t, values) in &world.partitions[p.0 as usize].tensors {
                    tensors.push((*t, payload.take_floats(values.len())?));
                }
                answers.push(match fault {
                    Fault::NotHere => Answer { partition: p, status: Status::NotHere, mark: 0, version: 0 },
                    _ => world.push(p, incarnation, header, (ids, gradients), &tensors),
                });
            }
            ps::answers(answer, kind::PUSHED, request.request(), &answers);
        }
        kind::FENCE => {
            let (task, lease, parts) = ps::take_fence(&mut payload)?;
            let mut answers = vec![];
            for _ in 0..parts {
                let (p, incarnation) = ps::take_part(&mut payload)?;
                answers.push(world.fence(p, incarnation, task, lease));
            }
            ps::answers(answer, kind::FENCED, request.request(), &answers);
        }
        other => {
            ps::refused(answer, request.request(), &format!("frame {other:#x}"));
            return Ok(());
        }
    }
    payload.end()
}

fn pull(
    payload: &mut Payload<'_>,
    request: u64,
    answer: &mut Frame,
    world: &mut World,
    fault: Fault,
) -> elasticdl_wire::Result<()> {
    let (mode, parts) = ps::take_pull(payload)?;
    answer.begin(kind::PULLED, request);
    answer.put(parts as u64);
    for _ in 0..parts {
        let (p, incarnation) = ps::take_part(payload)?;
        let ids = ps::take_ids(payload)?;
        let status = match fault {
            Fault::NotHere => Status::NotHere,
            _ if world.partitions[p.0 as usize].incarnation != incarnation => Status::WrongIncarnation,
            _ => Status::Ok,
        };
        answer.put_all(&[u64::from(p.0), status.word(), world.partitions[p.0 as usize].version]);
        if status != Status::Ok {
            continue;
        }
        let rows: Vec<f32> = ids.iter().flat_map(|id| world.row(p, *id, mode.births)).collect();
        answer.put_floats(&rows);
        if mode.tensors {
            for values in world.partitions[p.0 as usize].tensors.values() {
                answer.put_floats(values);
            }
        }
    }
    Ok(())
}
