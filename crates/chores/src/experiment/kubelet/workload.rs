//! What a pod of ours is as a process of this machine: its arguments and variables, with addresses and paths of
//! the cluster turned into those of the machine. Pure.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use elasticdl_operator::names;
use k8s_openapi::api::core::v1::{Container, EnvVar, Pod};
use kube::ResourceExt;

/// A pod as a process.
#[derive(Debug, PartialEq, Eq)]
pub struct Workload {
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Its variables.
    pub env: BTreeMap<String, String>,
    /// Where it works.
    pub directory: PathBuf,
}

/// What a pod finds on this machine.
#[derive(Debug)]
pub struct Places<'a> {
    /// Its own address.
    pub address: Ipv4Addr,
    /// Where its job's master is: what kube-proxy would lead the Service to.
    pub master: Ipv4Addr,
    /// The directory that stands for a secret that is mounted.
    pub secrets: &'a Path,
}

/// The container of a pod of ours, which has just one.
pub fn container(pod: &Pod) -> Result<&Container> {
    pod.spec.as_ref().and_then(|spec| spec.containers.first()).context("the pod has no container")
}

/// The secret that a pod mounts, and where.
pub fn secret(pod: &Pod) -> Option<(String, String)> {
    let spec = pod.spec.as_ref()?;
    let of_secret = |volume: &k8s_openapi::api::core::v1::Volume| {
        let name = volume.secret.as_ref()?.secret_name.clone()?;
        let mounts = spec.containers.first()?.volume_mounts.as_ref()?;
        let mount = mounts.iter().find(|mount| mount.name == volume.name)?;
        Some((name, mount.mount_path.clone()))
    };
    spec.volumes.as_ref()?.iter().find_map(of_secret)
}

/// Which job a pod is of, told apart from those of other namespaces.
pub fn job(pod: &Pod) -> String {
    let name = pod.labels().get(names::JOB).cloned().unwrap_or_default();
    format!("{}/{name}", pod.namespace().unwrap_or_default())
}

impl Workload {
    /// The process that a pod is.
    ///
    /// # Errors
    ///
    /// It wants something that no pod of ours wants: another volume, a field that is not known.
    pub fn of(pod: &Pod, places: &Places<'_>) -> Result<Workload> {
        let container = container(pod)?;
        check_volumes(pod, container)?;
        let mounted = secret(pod).map(|(_, path)| path);
        let local = |text: &str| match &mounted {
            Some(path) => text.replace(path.as_str(), &places.secrets.display().to_string()),
            None => text.to_owned(),
        };
        let mut env = BTreeMap::new();
        for variable in container.env.iter().flatten() {
            let value = local(&value(pod, variable, places.address)?);
            env.insert(variable.name.clone(), value);
        }
        let mut args: Vec<String> = container.args.iter().flatten().map(|arg| expand(arg, &env)).collect();
        let everywhere = format!("{}:", Ipv4Addr::UNSPECIFIED);
        for n in 0..args.len() {
            if let Some(port) = args[n].strip_prefix(&everywhere) {
                args[n] = format!("{}:{port}", places.address);
            } else if n > 0 && args[n - 1] == "--master" {
                let (_, port) = args[n].rsplit_once(':').context("--master has a port")?;
                args[n] = format!("{}:{port}", places.master);
            }
        }
        let directory = container.working_dir.clone().unwrap_or_else(|| "/".into()).into();
        Ok(Workload { args, env, directory })
    }
}

/// Nothing is mounted here: directories must be of the machine, at the path that the pod sees.
fn check_volumes(pod: &Pod, container: &Container) -> Result<()> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    for volume in volumes.filter(|volume| volume.secret.is_none() && volume.projected.is_none()) {
        let host = volume.host_path.as_ref().map(|host| &host.path);
        let mount = container.volume_mounts.iter().flatten().find(|mount| mount.name == volume.name);
        if host.is_none() || host != mount.map(|mount| &mount.mount_path) {
            bail!("the volume {} is no hostPath that is mounted at its own path", volume.name);
        }
    }
    Ok(())
}

fn value(pod: &Pod, variable: &EnvVar, address: Ipv4Addr) -> Result<String> {
    let Some(source) = &variable.value_from else { return Ok(variable.value.clone().unwrap_or_default()) };
    let path = source.field_ref.as_ref().map(|field| field.field_path.as_str()).unwrap_or_default();
    Ok(match path {
        "status.podIP" => address.to_string(),
        "metadata.name" => pod.name_any(),
        "metadata.namespace" => pod.namespace().unwrap_or_default(),
        "metadata.uid" => pod.uid().unwrap_or_default(),
        _ => bail!("the variable {} comes from {path:?}, which is not known here", variable.name),
    })
}

/// Replaces `$(NAME)` as Kubernetes does: what is not set stays as it is.
fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut text = text.to_owned();
    for (name, value) in env {
        text = text.replace(&format!("$({name})"), value);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(args: &[&str], volumes: Value) -> Pod {
        serde_json::from_value(json!({
            "metadata": { "name": "j-server-0", "namespace": "ns", "uid": "u", "labels": { names::JOB: "j" } },
            "spec": {
                "volumes": volumes,
                "containers": [{
                    "name": "elasticdl", "args": args, "workingDir": "/srv/j",
                    "volumeMounts": [{ "name": "job", "mountPath": "/etc/elasticdl" }, { "name": "v", "mountPath": "/srv/j" }],
                    "env": [
                        { "name": "POD_IP", "valueFrom": { "fieldRef": { "fieldPath": "status.podIP" } } },
                        { "name": "ELASTICDL_TOKEN_FILE", "value": "/etc/elasticdl/token" },
                    ],
                }],
            },
        }))
        .unwrap()
    }

    fn places(secrets: &Path) -> Places<'_> {
        Places { address: Ipv4Addr::new(127, 2, 0, 7), master: Ipv4Addr::new(127, 1, 0, 1), secrets }
    }

    fn volumes() -> Value {
        json!([{ "name": "job", "secret": { "secretName": "j-elasticdl" } }, { "name": "v", "hostPath": { "path": "/srv/j" } }])
    }

    #[test]
    fn addresses_and_secrets_of_a_pod_become_those_of_the_machine() {
        let args = ["ps", "--id", "0", "--master", "10.96.0.12:7070", "--listen", "$(POD_IP):7071"];
        let pod = pod(&args, volumes());
        let workload = Workload::of(&pod, &places(Path::new("/tmp/secrets"))).unwrap();
        assert_eq!(
            workload.args,
            ["ps", "--id", "0", "--master", "127.1.0.1:7070", "--listen", "127.2.0.7:7071"]
        );
        assert_eq!(workload.env["ELASTICDL_TOKEN_FILE"], "/tmp/secrets/token");
        assert_eq!(workload.directory, Path::new("/srv/j"));
        assert_eq!(secret(&pod), Some(("j-elasticdl".into(), "/etc/elasticdl".into())));
        assert_eq!(job(&pod), "ns/j");
    }

    #[test]
    fn a_master_listens_at_its_own_address_only() {
        let pod = pod(&["master", "--listen", "0.0.0.0:7070"], volumes());
        let workload = Workload::of(&pod, &places(Path::new("/s"))).unwrap();
        assert_eq!(workload.args, ["master", "--listen", "127.2.0.7:7070"]);
    }

    #[test]
    fn a_volume_that_would_have_to_be_mounted_is_refused() {
        let elsewhere = json!([{ "name": "v", "hostPath": { "path": "/srv/other" } }]);
        let error = Workload::of(&pod(&[], elsewhere), &places(Path::new("/s"))).unwrap_err();
        assert_eq!(error.to_string(), "the volume v is no hostPath that is mounted at its own path");
    }
}
