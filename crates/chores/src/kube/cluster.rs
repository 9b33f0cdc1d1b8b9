//! A cluster from beginning to end: what is started in which order, and how nothing of it stays behind.

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::cgroup::Cgroup;
use super::kubectl::{self, Kubectl};
use super::pki::Pki;
use super::places::{Places, make_directory, remove_directory};
use super::process::{Process, log_tail};
use super::state::{Lock, Phase, State, boot};
use super::wait::{self, Progress};
use super::{Shape, binaries, control, image, kwok, network, node, tunables};
use crate::packages;

/// The Debian packages that real nodes need.
const PACKAGES: [&str; 7] = [
    "containerd",
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "conntrack",
    "iptables",
    "iproute2",
];
/// How long a node may take to be ready.
const NODE_LIMIT: Duration = Duration::from_secs(90);

/// A cluster, and the right to change it.
#[derive(Debug)]
pub struct Cluster {
    /// Where it keeps what.
    pub places: Places,
    /// What runs.
    pub state: State,
    /// Tells what was reached.
    pub progress: Progress,
    _lock: Lock,
}

impl Cluster {
    /// Brings a cluster of that shape up, or finds that it is.
    pub fn up(shape: Shape, images: &[PathBuf]) -> Result<Cluster> {
        let images = resolved(images)?;
        let places = Places::find()?;
        let mut lock = Lock::take()?;
        if let Some(state) = State::read(&places)?.filter(runs_now) {
            ensure!(
                state.shape == shape,
                "a cluster is already up, and its nodes are others than asked for\n\
                 hint: `cargo xtask kube down` ends it, `cargo xtask kube status` shows it"
            );
            let cluster = Cluster { places, state, progress: Progress::begin(), _lock: lock };
            cluster.progress.say("the cluster is already up");
            cluster.import(&images)?;
            return Ok(cluster);
        }
        if let Some(owner) = lock.other_owner(&places)? {
            let members = Cgroup::cluster().members()?;
            ensure!(
                members.is_empty(),
                "a cluster that keeps its files in {owner} is already up\nhint: `cargo xtask kube down` ends it"
            );
        }
        packages::ensure_installed(&PACKAGES, "a node")?;
        let binaries = binaries::ensure_built(&places)?;
        let progress = Progress::begin();
        clean(&places)?;
        remove_directory(&places.logs())?;
        let state = State {
            phase: Phase::Starting,
            shape,
            binaries,
            boot: boot()?,
            processes: Vec::new(),
            tunables: tunables::read(),
        };
        lock.claim(&places)?;
        state.write(&places)?;
        let mut cluster = Cluster { places, state, progress, _lock: lock };
        cluster.start(&images).with_context(|| {
            let logs = cluster.places.logs();
            format!(
                "the cluster did not come up; logs: {}, and `cargo xtask kube down` cleans up",
                logs.display()
            )
        })?;
        Ok(cluster)
    }

    /// The cluster that is up.
    pub fn running() -> Result<Cluster> {
        let places = Places::find()?;
        let lock = Lock::take()?;
        match State::read(&places)?.filter(runs_now) {
            Some(state) => Ok(Cluster { places, state, progress: Progress::begin(), _lock: lock }),
            None => bail!("no cluster is up\nhint: `cargo xtask kube up` starts one"),
        }
    }

    /// Ends whatever there is, whole or broken.
    pub fn down() -> Result<()> {
        let places = Places::find()?;
        let _lock = Lock::take()?;
        Cluster::end(&places)
    }

    /// Ends this one.
    pub fn into_down(self) -> Result<()> {
        Cluster::end(&self.places)
    }

    /// Ends whatever there is, and removes what a cluster leaves for reading or for the next one.
    pub fn purge() -> Result<()> {
        let places = Places::find()?;
        let _lock = Lock::take()?;
        Cluster::end(&places)?;
        for directory in [places.logs(), places.images(), places.shared()] {
            remove_directory(&directory)?;
        }
        binaries::remove_others(&places, binaries::current(&places).as_deref())
    }

    /// What tests need to know of it, as environment variables.
    pub fn test_environment(&self) -> Result<Vec<(&'static str, String)>> {
        let text = |path: &Path| path.display().to_string();
        let volume = serde_json::json!({ "hostPath": { "path": self.places.shared() } });
        Ok(vec![
            ("ELASTICDL_TEST_KUBECONFIG", text(&self.places.admin_config())),
            ("ELASTICDL_TEST_KUBECTL", text(&self.state.binaries.join("kubectl"))),
            ("ELASTICDL_TEST_VOLUME", volume.to_string()),
            ("ELASTICDL_TEST_BUSYBOX", image::BUSYBOX.into()),
            ("ELASTICDL_TEST_POWER", text(&std::env::current_exe().context("finding this program")?)),
            ("KUBECACHEDIR", text(&kubectl::cache_directory(&self.places))),
        ])
    }

    /// The line that points a shell at the cluster.
    pub fn exports(&self) -> String {
        format!(
            "export KUBECONFIG=\"{}\" KUBECACHEDIR=\"{}\" PATH=\"{}:$PATH\"",
            self.places.admin_config().display(),
            kubectl::cache_directory(&self.places).display(),
            self.state.binaries.display(),
        )
    }

    /// Powers a node off as if its plug were pulled.
    pub fn power_off(&mut self, node: &str) -> Result<()> {
        let index = node::index(node, self.state.shape.nodes)?;
        let name = node::name(index);
        ensure!(self.state.node_is_on(&name), "{name} is off already");
        node::power_off(self, index)?;
        self.progress.say(&format!("{name} is off"));
        Ok(())
    }

    /// Powers a node on, and waits until it is ready.
    pub fn power_on(&mut self, node: &str) -> Result<()> {
        let index = node::index(node, self.state.shape.nodes)?;
        let name = node::name(index);
        ensure!(!self.state.node_is_on(&name), "{name} is on already");
        let before = self.last_word(&name)?.heard;
        node::power_on(self, index)?;
        self.wait_for_node(&name, &before)
    }

    /// Cuts a node off; what runs there goes on, and nobody hears of it.
    pub fn cut(&mut self, node: &str) -> Result<()> {
        let index = node::index(node, self.state.shape.nodes)?;
        let name = node::name(index);
        ensure!(self.state.node_is_on(&name), "{name} is off");
        network::cut(index)?;
        self.progress.say(&format!("{name} is cut off"));
        Ok(())
    }

    /// Puts a node's cable back, and waits until it is ready.
    pub fn mend(&mut self, node: &str) -> Result<()> {
        let index = node::index(node, self.state.shape.nodes)?;
        let name = node::name(index);
        ensure!(self.state.node_is_on(&name), "{name} is off");
        let before = self.last_word(&name)?.heard;
        network::mend(index)?;
        self.wait_for_node(&name, &before)
    }

    /// Gives every node that is on an image.
    pub fn load(&self, images: &[PathBuf]) -> Result<()> {
        self.import(&resolved(images)?)?;
        self.progress.say("nodes have the images");
        Ok(())
    }

    /// A kubectl of this cluster.
    pub fn kubectl(&self) -> Kubectl {
        Kubectl::new(&self.places, &self.state.binaries)
    }

    /// Starts a process and writes it down.
    pub fn launch(
        &mut self,
        name: &str,
        node: Option<&str>,
        group: &Cgroup,
        command: &[OsString],
    ) -> Result<u32> {
        let process = Process::start(name, node, group, &self.places.log(name), command)?;
        let pid = process.pid;
        self.state.processes.push(process);
        self.state.write(&self.places)?;
        Ok(pid)
    }

    /// Takes the processes of a node off the list.
    pub fn forget(&mut self, node: &str) -> Result<()> {
        self.state.processes.retain(|process| process.node.as_deref() != Some(node));
        self.state.write(&self.places)
    }

    /// Waits for something, and fails at once where a process of the cluster dies meanwhile.
    pub fn until<T>(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        wait::until(what, limit, || {
            if let Some(dead) = self.state.dead().next() {
                bail!("{} died; the end of its log:\n{}", dead.name, log_tail(&self.places.log(&dead.name)));
            }
            look()
        })
    }

    fn start(&mut self, images: &[PathBuf]) -> Result<()> {
        let nodes = self.state.shape.nodes;
        for directory in [self.places.logs(), self.places.shared()] {
            make_directory(&directory)?;
        }
        // Pods write there as whatever user they run as.
        fs::set_permissions(self.places.shared(), Permissions::from_mode(0o1777))
            .context("open the shared directory to pods")?;
        Pki::make(&self.places.pki(), nodes)?;
        network::make_control(nodes)?;
        control::start_api(self)?;
        // The API server takes a while: nodes get their images meanwhile.
        let base = image::base_images(&self.places, &self.state.binaries)?;
        for index in 1..=nodes {
            node::make(self, index)?;
            node::start_runtime(self, index)?;
        }
        self.import(&base)?;
        self.import(images)?;
        if nodes > 0 {
            self.progress.say("containerd runs and has its images");
        }
        control::start_rest(self)?;
        (1..=nodes).try_for_each(|index| node::start_kubelet(self, index))?;
        if nodes > 0 {
            control::start_proxy(self)?;
        }
        control::wait_for_rest(self)?;
        if self.state.shape.simulated > 0 {
            kwok::start(self)?;
        }
        (1..=nodes).try_for_each(|index| self.wait_for_node(&node::name(index), ""))?;
        if self.state.shape.simulated > 0 {
            kwok::wait(self)?;
            self.progress.say(&format!("{} simulated nodes are ready", self.state.shape.simulated));
        }
        self.until("nothing", Duration::ZERO, || Ok(Some(())))?;
        self.state.phase = Phase::Up;
        self.state.write(&self.places)
    }

    /// A node that was lost counts as ready for a moment longer, so it must have spoken since `before`.
    fn wait_for_node(&self, name: &str, before: &str) -> Result<()> {
        self.until(&format!("{name} to be ready"), NODE_LIMIT, || {
            let word = self.last_word(name)?;
            Ok((word.ready && word.heard != before).then_some(()))
        })?;
        self.progress.say(&format!("{name} is ready"));
        Ok(())
    }

    /// What the API server last heard of a node; nothing where it does not know it.
    fn last_word(&self, node: &str) -> Result<LastWord> {
        let wanted =
            r#"--output=jsonpath={.status.conditions[?(@.type=="Ready")]['status','lastHeartbeatTime']}"#;
        let word = self.kubectl().text(&["get", "node", node, "--ignore-not-found", wanted])?;
        let (ready, heard) = word.split_once(' ').unwrap_or_default();
        Ok(LastWord { ready: ready == "True", heard: heard.to_owned() })
    }

    fn import(&self, images: &[PathBuf]) -> Result<()> {
        for index in 1..=self.state.shape.nodes {
            let name = node::name(index);
            if self.state.phase == Phase::Up && !self.state.node_is_on(&name) {
                self.progress.say(&format!("{name} is off and gets no image"));
                continue;
            }
            images.iter().try_for_each(|image| node::import(self, index, image))?;
        }
        Ok(())
    }

    fn end(places: &Places) -> Result<()> {
        let progress = Progress::begin();
        clean(places)?;
        progress.say("no cluster is up any more");
        Ok(())
    }
}

/// What the API server last heard of a node.
struct LastWord {
    ready: bool,
    /// When.
    heard: String,
}

/// Ends and removes everything a cluster may have left, in whatever state it is. Asks the machine and not
/// what is written down: an `up` may have been killed before it could write.
fn clean(places: &Places) -> Result<()> {
    Cgroup::cluster().kill()?;
    network::remove()?;
    Cgroup::cluster().remove()?;
    if let Some(state) = State::read(places)?
        && state.boot == boot()?
    {
        tunables::restore(&state.tunables);
    }
    remove_directory(&places.run())?;
    match fs::remove_file(places.state()) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).context("forget the cluster")
        }
        _ => Ok(()),
    }
}

/// Whether it is a cluster that this start of the machine has seen, and that still serves.
fn runs_now(state: &State) -> bool {
    boot().is_ok_and(|boot| boot == state.boot) && state.serves()
}

/// Nodes do not work in this directory.
fn resolved(images: &[PathBuf]) -> Result<Vec<PathBuf>> {
    images
        .iter()
        .map(|image| image.canonicalize().with_context(|| format!("find {}", image.display())))
        .collect()
}
