//! The command line of `image` and `zoo`.

use std::path::{Component, Path, PathBuf};

use clap::{Args, Subcommand};

use crate::image::reference::{Reference, check_registry};

/// The name of an image of this program that is given none.
pub const OWN_IMAGE: &str = concat!("elasticdl.org/elasticdl:", env!("CARGO_PKG_VERSION"));

/// Arguments of `image`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl image --out elasticdl.tar
  elasticdl image --out ctr.tar --name registry.example.com/team/ctr:v1 --add jobs:/jobs
  elasticdl image --out py.tar --base python.tar --user 0

No Docker is needed, and none runs. The archive is taken by
  ctr --namespace k8s.io images import elasticdl.tar
  docker load --input elasticdl.tar         podman load --input elasticdl.tar
  skopeo copy oci-archive:elasticdl.tar docker://REGISTRY/NAME:TAG
  elasticdl zoo push elasticdl.tar --registry REGISTRY

It holds the program, its shared libraries where it is not static, /tmp, users and this machine's
CA certificates. `cargo xtask image` builds a static program first, which runs on any Linux; shared
libraries are those of this machine. With --base, what the base has is kept and only what it lacks
is added, so prefer a static program there. The same input gives the same bytes.

It runs as user 65532, since many clusters refuse root. Volumes that belong to root, as hostPath
volumes mostly do, can then be read and not written: let the user own the directory, use --user 0,
or set runAsUser in the pod. For other kinds of volumes fsGroup: 65532 in the pod is enough.")]
pub struct Image {
    /// File to write.
    #[arg(long, value_name = "FILE.tar")]
    pub out: PathBuf,
    /// Name of the image.
    #[arg(long, value_name = "REF", default_value = OWN_IMAGE)]
    pub name: Reference,
    /// The elasticdl program to put in; by default this one.
    #[arg(long, value_name = "PATH")]
    pub binary: Option<PathBuf>,
    /// A file or directory to put in, and where; may be repeated.
    #[arg(long, value_name = "SRC:DEST", value_parser = add)]
    pub add: Vec<Add>,
    /// An OCI image archive to build upon.
    #[arg(long, value_name = "ARCHIVE.tar")]
    pub base: Option<PathBuf>,
    /// Whom the program runs as; by default the base's user, or else 65532:65532.
    #[arg(long, value_name = "UID[:GID]", value_parser = user)]
    pub user: Option<String>,
    /// The result as a JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Something to put into an image.
#[derive(Debug, Clone)]
pub struct Add {
    /// A file or directory of this machine.
    pub source: PathBuf,
    /// Where it goes; with a slash at the end, a file keeps its name below it.
    dest: String,
}

impl Add {
    /// Where it goes.
    pub fn place(&self) -> PathBuf {
        let dest = PathBuf::from(&self.dest);
        match self.source.file_name() {
            Some(name) if self.dest.ends_with('/') && self.source.is_file() => dest.join(name),
            // Put together again, so that slashes at the end and dots in the middle are gone.
            _ => dest.components().collect(),
        }
    }
}

fn add(text: &str) -> Result<Add, String> {
    let (source, dest) = text.rsplit_once(':').ok_or("write it as SRC:DEST, for example zoo:/model_zoo")?;
    let inside = Path::new(dest).components().all(|part| part != Component::ParentDir);
    if !dest.starts_with('/') || !inside {
        return Err(format!("{dest:?} is no place in an image: it has to start with / and go down"));
    }
    Ok(Add { source: source.into(), dest: dest.into() })
}

fn user(text: &str) -> Result<String, String> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    if uid.parse::<u32>().is_err() || gid.parse::<u32>().is_err() {
        // A cluster that wants no root can tell by a number only.
        return Err("write it as numbers, UID or UID:GID, for example 1000:1000".into());
    }
    Ok(format!("{uid}:{gid}"))
}

/// Model zoos: job files in an image.
#[derive(Debug, Subcommand)]
pub enum Zoo {
    /// Make a model zoo: a directory with a job file to start from.
    Init(ZooInit),
    /// Make an image of elasticdl with a model zoo in it.
    Build(ZooBuild),
    /// Send an image to a registry.
    Push(ZooPush),
}

/// Arguments of `zoo init`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  elasticdl zoo init model_zoo
  elasticdl train model_zoo/job.yaml

Files that are there already are left alone.")]
pub struct ZooInit {
    /// The directory; made where it is missing.
    #[arg(value_name = "DIR", default_value = "model_zoo")]
    pub dir: PathBuf,
    /// The image that its Dockerfile builds upon; only `zoo build --docker` reads that.
    #[arg(long, value_name = "REF", default_value = OWN_IMAGE)]
    pub base_image: Reference,
}

/// Arguments of `zoo build`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl zoo build model_zoo --image registry.example.com/team/zoo:v1
  elasticdl zoo push registry.example.com/team/zoo:v1

The image is that of `elasticdl image` with the directory at /model_zoo, in a layer of its own. No
Docker is needed; --docker runs `docker build` on the directory's Dockerfile instead. .git,
__pycache__, Dockerfile and .dockerignore stay out of the image.")]
pub struct ZooBuild {
    /// The model zoo.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Name of the image.
    #[arg(long, value_name = "REF")]
    pub image: Reference,
    /// File to write; by default NAME-TAG.tar in this directory.
    #[arg(long, value_name = "FILE.tar", conflicts_with = "docker")]
    pub out: Option<PathBuf>,
    /// The elasticdl program to put in; by default this one.
    #[arg(long, value_name = "PATH", conflicts_with = "docker")]
    pub binary: Option<PathBuf>,
    /// An OCI image archive to build upon.
    #[arg(long, value_name = "ARCHIVE.tar", conflicts_with = "docker")]
    pub base: Option<PathBuf>,
    /// Whom the program runs as; by default the base's user, or else 65532:65532.
    #[arg(long, value_name = "UID[:GID]", value_parser = user, conflicts_with = "docker")]
    pub user: Option<String>,
    /// Let Docker build it, from the directory's Dockerfile.
    #[arg(long)]
    pub docker: bool,
    /// The result as a JSON object.
    #[arg(long, conflicts_with = "docker")]
    pub json: bool,
}

/// Arguments of `zoo push`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  elasticdl zoo push registry.example.com/team/zoo:v1      from zoo-v1.tar in this directory
  elasticdl zoo push elasticdl.tar --registry localhost:5000 --insecure

Layers that the registry has are not sent again. Who you are is taken from Docker's config.json,
where `docker login` writes it ($DOCKER_CONFIG, or ~/.docker), credential helpers included.")]
pub struct ZooPush {
    /// An image archive, or the name that `zoo build` was given.
    #[arg(value_name = "REF|FILE.tar")]
    pub image: String,
    /// Where to send it; by default the registry in the image's name.
    #[arg(long, value_name = "HOST[:PORT]", value_parser = registry)]
    pub registry: Option<String>,
    /// Speak plain HTTP, as registries on this machine do.
    #[arg(long)]
    pub insecure: bool,
    /// Let Docker push an image that it built.
    #[arg(long, conflicts_with_all = ["registry", "insecure"])]
    pub docker: bool,
    /// The result as a JSON object.
    #[arg(long, conflicts_with = "docker")]
    pub json: bool,
}

fn registry(text: &str) -> Result<String, String> {
    check_registry(text).map(|()| text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_an_image_are_absolute_and_stay_inside() {
        assert_eq!(add("zoo:/model_zoo/./a/").unwrap().place(), Path::new("/model_zoo/a"));
        assert_eq!(add("c:d:/x").unwrap().source, Path::new("c:d"));
        let own = file!().rsplit('/').next().unwrap_or_default();
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/args").join(own);
        let kept = add(&format!("{}:/jobs/", here.display())).unwrap().place();
        assert_eq!(kept, Path::new("/jobs").join(own));
        for wrong in ["zoo", "zoo:model_zoo", "zoo:/a/../../etc"] {
            assert!(add(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_user_is_a_number_and_its_group_the_same_one_where_none_is_said() {
        assert_eq!(user("0").unwrap(), "0:0");
        assert_eq!(user("1000:100").unwrap(), "1000:100");
        assert!(user("root").unwrap_err().contains("1000:1000"));
    }
}
