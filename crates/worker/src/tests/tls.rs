//! The client against real servers that ask for the job's certificate.

use std::net::TcpListener;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

use elasticdl_nn::Gradients;
use elasticdl_ps::{Model as PsModel, Partition, Partitions, Server};
use elasticdl_spec::{OptimizerSpec, PartitionId, TablesSpec, TaskId};
use elasticdl_wire::ps::{PullMode, PushHeader};
use elasticdl_wire::{Identity, Token};

use super::{PARTITIONS, batch, lease, shape};
use crate::dedup::{Deduper, Keys};
use crate::ps_client::{self, Directory, Place, Places, PsClient};
use crate::stop::Stop;
use crate::store::{Fence, Pulled, Push, Pushed, Store};

const TOKEN: &str = "0123456789abcdef";
const TASK: TaskId = TaskId { purpose: elasticdl_spec::Purpose::Train, epoch: 0, shard: 3 };
const DEADLINE: Duration = Duration::from_secs(60);

#[expect(clippy::disallowed_methods, reason = "a certificate is of today")]
fn identity() -> Identity {
    Identity::make(SystemTime::now()).unwrap()
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// A server of all partitions, whose weights go down by their gradients.
fn server(listener: TcpListener, identity: Option<&Identity>) -> Server {
    let optimizer = OptimizerSpec::Sgd { learning_rate: 1.0 };
    let model = Arc::new(PsModel::new("test", shape(), optimizer, 7, PARTITIONS));
    let partitions = Arc::new(Partitions::new(Arc::clone(&model)));
    for id in (0..PARTITIONS).map(PartitionId) {
        partitions.open(Partition::new(Arc::clone(&model), id, 1));
    }
    let token = Token::new(TOKEN).unwrap();
    Server::start(listener, token, identity.cloned(), partitions, Default::default()).unwrap()
}

/// All partitions at one address, and how often it was asked for.
#[derive(Clone)]
struct At(Arc<(Mutex<(String, u32)>, Condvar)>);

impl At {
    fn new(address: String) -> Self {
        At(Arc::new((Mutex::new((address, 0)), Condvar::new())))
    }

    /// Waits until it was asked for once more, and then so often.
    fn asked_again(&self, times: u32) {
        let mut state = self.0.0.lock().unwrap();
        let enough = state.1 + times;
        state = self.0.1.wait_timeout_while(state, DEADLINE, |state| state.1 < enough).unwrap().0;
        assert!(state.1 >= enough, "nobody asked where the server is");
    }

    fn moved(&self, address: String) {
        self.0.0.lock().unwrap().0 = address;
    }
}

impl Places for At {
    fn places(&self) -> elasticdl_wire::Result<Vec<(PartitionId, Place)>> {
        let mut state = self.0.0.lock().unwrap();
        state.1 += 1;
        self.0.1.notify_all();
        let place = |p| (PartitionId(p), Place { incarnation: 1, address: state.0.clone() });
        Ok((0..PARTITIONS).map(place).collect())
    }
}

/// A client with something to pull.
struct Rig {
    client: PsClient,
    keys: Keys,
    pulled: Pulled,
}

impl Rig {
    fn new(at: &At, identity: Option<&Identity>) -> Self {
        let client = PsClient::new(ps_client::Config {
            shape: Arc::new(shape()),
            tables: TablesSpec::default(),
            partitions: PARTITIONS,
            directory: Arc::new(Directory::new(PARTITIONS, Box::new(at.clone()))),
            token: Token::new(TOKEN).unwrap(),
            identity: identity.cloned(),
            worker: 1,
            staged: false,
            stop: Stop::default(),
        });
        let mut keys = Keys::default();
        Deduper::new(PARTITIONS).dedup(&batch(TASK, 0, 16).ids, &mut keys);
        Rig { client, keys, pulled: Pulled::default() }
    }

    fn pull(&mut self) -> &Pulled {
        let mode = PullMode { births: true, tensors: true };
        self.client.pull(&self.keys, mode, &mut self.pulled).unwrap();
        &self.pulled
    }

    /// Pushes a gradient of 1 for every weight.
    fn push(&mut self, batch: u64) -> Pushed {
        let Fence::Held { mark, generation, .. } = self.client.fence(TASK, lease(1)).unwrap() else {
            panic!("the task is ours")
        };
        assert_eq!(mark, batch);
        let mut gradients = Gradients::default();
        gradients.reset(&shape(), &[self.keys.unique()]);
        gradients.tables.iter_mut().chain(&mut gradients.tensors).for_each(|g| g.fill(1.0));
        let push = Push {
            header: PushHeader { task: TASK, batch, lease: lease(1), records: 16, factor: 1.0 },
            generation,
            keys: &self.keys,
            versions: &self.pulled.versions,
            gradients: &gradients,
        };
        self.client.push(&push).unwrap()
    }
}

#[test]
fn what_is_pushed_over_tls_is_pulled_over_tls() {
    let identity = identity();
    let (listener, address) = listener();
    let _server = server(listener, Some(&identity));
    let mut rig = Rig::new(&At::new(address), Some(&identity));
    let born = rig.pull().clone();
    for (id, row) in rig.keys.ids().iter().zip(born.rows[0].chunks_exact(2)) {
        let mut expected = [0.0; 2];
        shape().tables[0].init_row(7, *id, &mut expected);
        assert_eq!(row, expected);
    }
    for batch in 0..3 {
        assert_eq!(rig.push(batch), Pushed::Applied);
    }
    let moved = rig.pull();
    assert_eq!(moved.versions, [3; PARTITIONS as usize]);
    for (now, then) in moved.rows[0].iter().zip(&born.rows[0]) {
        assert_eq!(*now, then - 1.0 - 1.0 - 1.0);
    }
}

/// A server listens before it has its rows: the handshake is waited for as any answer is.
#[test]
fn a_server_that_is_still_loading_is_waited_for() {
    let identity = identity();
    let (listener, address) = listener();
    let at = At::new(address);
    let mut rig = Rig::new(&at, Some(&identity));
    std::thread::scope(|scope| {
        let pull = scope.spawn(|| rig.pull().versions.clone());
        // Once to begin with, and again because it had to wait.
        at.asked_again(2);
        let server = server(listener, Some(&identity));
        assert_eq!(pull.join().unwrap(), [0; PARTITIONS as usize]);
        drop(server);
    });
}

#[test]
fn a_server_of_another_job_is_not_believed_and_gets_no_token() {
    let ours = identity();
    let (theirs, their_address) = listener();
    let (listener, address) = listener();
    for stranger in [Some(identity()), None] {
        let _stranger = server(theirs.try_clone().unwrap(), stranger.as_ref());
        let at = At::new(their_address.clone());
        let mut rig = Rig::new(&at, Some(&ours));
        let server = server(listener.try_clone().unwrap(), Some(&ours));
        std::thread::scope(|scope| {
            let pull = scope.spawn(|| rig.pull().versions.clone());
            at.asked_again(3);
            assert!(!pull.is_finished(), "the stranger's rows are not taken");
            at.moved(address.clone());
            assert_eq!(pull.join().unwrap(), [0; PARTITIONS as usize]);
        });
        drop(server);
    }
}
