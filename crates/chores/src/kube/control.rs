//! The control plane: etcd, API server, scheduler, controllers, in a network namespace of their own.

use std::ffi::OsString;
use std::net::TcpStream;
use std::time::Duration;

use anyhow::Result;

use super::cgroup::Cgroup;
use super::cluster::Cluster;
use super::network::{self, CONTROL, CONTROL_IP, PODS, SERVICES, namespace_path};
use super::places::make_directory;
use super::process::command_line;

const LIMIT: Duration = Duration::from_secs(60);

/// The scheduler and the controllers may ask this often: 400 pods take 11 s and not 25.
const CALLS: [&str; 2] = ["--kube-api-qps=300", "--kube-api-burst=600"];

/// A lost node is noticed after 10 s, and its pods are replaced 2 s later. The usual is 50 s and 300 s.
const NODE_LOSS: [&str; 5] = [
    "--node-monitor-period=1s",
    "--node-monitor-grace-period=10s",
    // However many nodes are lost at once, the pods of each are replaced at once.
    "--node-eviction-rate=100",
    "--secondary-node-eviction-rate=100",
    "--unhealthy-zone-threshold=1",
];
const PATIENCE: [&str; 2] =
    ["--default-not-ready-toleration-seconds=2", "--default-unreachable-toleration-seconds=2"];

/// Starts the store, and the API server as soon as the store answers.
pub fn start_api(cluster: &mut Cluster) -> Result<()> {
    let data = cluster.places.run().join("etcd");
    make_directory(&data)?;
    launch(cluster, "etcd", [format!("--data-dir={}", data.display())])?;
    wait_for_port(cluster, "etcd", 2379)?;
    let arguments = api_arguments(cluster);
    launch(cluster, "kube-apiserver", arguments)
}

fn api_arguments(cluster: &Cluster) -> Vec<String> {
    let pki = |file: &str| cluster.places.pki().join(file).display().to_string();
    let mut arguments = vec![
        "--etcd-servers=http://127.0.0.1:2379".to_owned(),
        "--bind-address=0.0.0.0".into(),
        "--secure-port=6443".into(),
        format!("--advertise-address={CONTROL_IP}"),
        format!("--service-cluster-ip-range={SERVICES}"),
        format!("--tls-cert-file={}", pki("apiserver.crt")),
        format!("--tls-private-key-file={}", pki("apiserver.key")),
        format!("--client-ca-file={}", pki("ca.crt")),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={}", pki("accounts.pub")),
        format!("--service-account-signing-key-file={}", pki("accounts.key")),
        "--authorization-mode=Node,RBAC".into(),
        "--enable-admission-plugins=NodeRestriction".into(),
        "--allow-privileged=true".into(),
        format!("--kubelet-client-certificate={}", pki("apiserver-kubelet.crt")),
        format!("--kubelet-client-key={}", pki("apiserver-kubelet.key")),
        format!("--kubelet-certificate-authority={}", pki("ca.crt")),
        "--kubelet-preferred-address-types=InternalIP".into(),
        // Scheduler and controllers ask here whom to trust in front of them; nobody is.
        format!("--requestheader-client-ca-file={}", pki("ca.crt")),
        "--requestheader-allowed-names=nobody".into(),
    ];
    arguments.extend(PATIENCE.map(str::to_owned));
    arguments
}

/// Waits for the API server, then starts what needs it, and waits until pods can be made.
pub fn start_rest(cluster: &mut Cluster) -> Result<()> {
    let kubectl = cluster.kubectl();
    cluster.until("the API server to be ready", LIMIT, || {
        Ok(kubectl.text(&["get", "--raw=/readyz"]).ok().map(drop))
    })?;
    cluster.progress.say("the API server is ready");

    let pki = cluster.places.pki();
    let config = |file: &str| {
        let path = pki.join(file).display().to_string();
        ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"]
            .map(|flag| format!("--{flag}={path}"))
    };
    let common = ["--bind-address=127.0.0.1", "--leader-elect=false"]
        .iter()
        .chain(&CALLS)
        .map(|&flag| flag.to_owned());
    let scheduler = config("scheduler.kubeconfig").into_iter().chain(common.clone());
    launch(cluster, "kube-scheduler", scheduler)?;

    let file = |flag: &str, name: &str| format!("--{flag}={}", pki.join(name).display());
    let controllers = config("controller-manager.kubeconfig").into_iter().chain(common).chain([
        "--use-service-account-credentials=true".to_owned(),
        file("service-account-private-key-file", "accounts.key"),
        file("root-ca-file", "ca.crt"),
        file("cluster-signing-cert-file", "ca.crt"),
        file("cluster-signing-key-file", "ca.key"),
    ]);
    launch(cluster, "kube-controller-manager", controllers.chain(NODE_LOSS.map(str::to_owned)))
}

/// Waits until the scheduler and the controllers work, which is when pods can be made.
pub fn wait_for_rest(cluster: &Cluster) -> Result<()> {
    wait_for_port(cluster, "kube-scheduler", 10259)?;
    wait_for_port(cluster, "kube-controller-manager", 10257)?;
    cluster.kubectl().wait("create", &["serviceaccount/default"], LIMIT)?;
    cluster.progress.say("scheduler and controllers are at work");
    Ok(())
}

/// Makes Services reachable from the machine and from the API server, as on any node.
///
/// There is no Node of the control plane's own, and a proxy waits 30 s for one in vain: so it takes the first
/// node's name, from which it reads nothing that its bind address does not already tell.
pub fn start_proxy(cluster: &mut Cluster) -> Result<()> {
    let config = cluster.places.pki().join("proxy.kubeconfig");
    let arguments = proxy_arguments(&config.display().to_string(), "n1", CONTROL_IP);
    launch(cluster, "kube-proxy", arguments)
}

/// Flags of kube-proxy, here and on nodes. It leaves the machine's connection tracking as it is.
pub fn proxy_arguments(config: &str, node: &str, ip: &str) -> Vec<String> {
    vec![
        format!("--kubeconfig={config}"),
        format!("--hostname-override={node}"),
        format!("--bind-address={ip}"),
        format!("--cluster-cidr={PODS}"),
        "--proxy-mode=iptables".into(),
        "--conntrack-max-per-core=0".into(),
        "--conntrack-tcp-timeout-established=0".into(),
        "--conntrack-tcp-timeout-close-wait=0".into(),
        "--healthz-bind-address=127.0.0.1:10256".into(),
        "--metrics-bind-address=127.0.0.1:10249".into(),
    ]
}

/// Starts one of the cluster's programs in the control plane's namespace.
pub fn launch(
    cluster: &mut Cluster,
    program: &str,
    arguments: impl IntoIterator<Item = String>,
) -> Result<()> {
    let net = format!("--net={}", namespace_path(CONTROL));
    let mut command: Vec<OsString> = command_line("nsenter", [&net]);
    command.extend(command_line(cluster.state.binaries.join(program), arguments));
    cluster.launch(program, None, &Cgroup::control(), &command).map(drop)
}

fn wait_for_port(cluster: &Cluster, process: &str, port: u16) -> Result<()> {
    cluster.until(&format!("{process} to listen"), LIMIT, || {
        network::inside(CONTROL, || Ok(TcpStream::connect(("127.0.0.1", port)).ok().map(drop)))
    })
}
