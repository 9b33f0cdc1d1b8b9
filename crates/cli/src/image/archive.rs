//! The OCI image layout: the documents that tie layers together, and a tar file of it all.
//!
//! `index.json` names a manifest, which names a configuration and layers, all by digest. `manifest.json` says
//! the same in Docker's own way: an engine without containerd's image store reads that and nothing else.

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use tar::{Builder, EntryType, Header};

use super::digest::Digest;
use super::furniture::HOME;
use super::layer::Layer;
use super::reference::Reference;
use super::{PROGRAM, USER};

/// Media type of an index.
pub const MEDIA_INDEX: &str = "application/vnd.oci.image.index.v1+json";
/// Media type of a manifest.
pub const MEDIA_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
/// Media type of a configuration.
const MEDIA_CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Media type of a layer that is packed as ours are.
pub const MEDIA_LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// The annotation that containerd and podman take an image's whole name from.
pub const ANNOTATION_NAME: &str = "io.containerd.image.name";
/// The annotation with the tag alone, as the layout's own standard has it.
const ANNOTATION_TAG: &str = "org.opencontainers.image.ref.name";

/// When an image was made: never, or the same input would not give the same bytes.
const CREATED: &str = "1970-01-01T00:00:00Z";

/// Names a part by digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    /// What it is.
    pub media_type: String,
    /// Its digest.
    pub digest: Digest,
    /// Its length.
    pub size: u64,
    /// What it runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    /// Notes, its name among them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

impl Descriptor {
    /// Without platform and notes.
    pub fn new(media_type: &str, digest: Digest, size: u64) -> Self {
        let media_type = media_type.to_string();
        Descriptor { media_type, digest, size, platform: None, annotations: BTreeMap::new() }
    }
}

/// What an image runs on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    /// The processor: amd64, arm64.
    pub architecture: String,
    /// The kernel: linux.
    pub os: String,
}

/// `index.json`, or an index that one names.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Index {
    /// Always 2.
    pub schema_version: u32,
    /// What it is.
    #[serde(default)]
    pub media_type: Option<String>,
    /// The images, or more indices.
    pub manifests: Vec<Descriptor>,
}

/// One image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Manifest {
    /// Always 2.
    pub schema_version: u32,
    /// What it is.
    #[serde(default)]
    pub media_type: Option<String>,
    /// How it is started.
    pub config: Descriptor,
    /// What it holds, lowest first.
    pub layers: Vec<Descriptor>,
}

/// How an image is started, and what its layers unpack to. What a base says beyond that is kept.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Config {
    #[serde(default)]
    created: String,
    #[serde(default)]
    pub(super) architecture: String,
    #[serde(default)]
    os: String,
    #[serde(default, deserialize_with = "or_nothing")]
    config: Map<String, Value>,
    rootfs: RootFs,
    #[serde(default, deserialize_with = "or_nothing", skip_serializing_if = "Vec::is_empty")]
    history: Vec<Value>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct RootFs {
    #[serde(rename = "type")]
    kind: String,
    diff_ids: Vec<Digest>,
}

/// Go programs write an empty list as null.
fn or_nothing<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Config {
    /// Without any layer.
    pub fn bare() -> Self {
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let Value::Object(config) = json!({ "Env": [path] }) else { unreachable!("it is an object") };
        Config {
            created: String::new(),
            architecture: String::new(),
            os: String::new(),
            config,
            rootfs: RootFs { kind: "layers".into(), diff_ids: Vec::new() },
            history: Vec::new(),
            rest: Map::new(),
        }
    }

    /// UID:GID, or what a base says instead.
    pub fn user(&self) -> &str {
        self.config.get("User").and_then(Value::as_str).unwrap_or_default()
    }

    /// Sets UID:GID.
    pub fn set_user(&mut self, user: &str) {
        self.config.insert("User".into(), user.into());
    }

    /// With our program as what is started, and our layers on top.
    pub fn finish(mut self, architecture: &str, layers: &[Layer]) -> Self {
        if self.user().is_empty() {
            self.set_user(&format!("{USER}:{USER}"));
        }
        self.created = CREATED.into();
        self.architecture = architecture.into();
        self.os = "linux".into();
        self.config.insert("Entrypoint".into(), json!([PROGRAM]));
        self.config.insert("WorkingDir".into(), HOME.into());
        self.config.remove("Cmd");
        let mut env = self.config.get("Env").and_then(Value::as_array).cloned().unwrap_or_default();
        env.retain(|item| !item.as_str().is_some_and(|item| item.starts_with("HOME=")));
        env.push(format!("HOME={HOME}").into());
        self.config.insert("Env".into(), env.into());
        // A history has to tell of every layer or of none.
        let told = !self.history.is_empty() || self.rootfs.diff_ids.is_empty();
        for layer in layers {
            self.rootfs.diff_ids.push(layer.diff_id.clone());
            if told {
                self.history.push(json!({ "created": CREATED, "created_by": "elasticdl image" }));
            }
        }
        self
    }
}

/// The bytes of a part: a stretch of a file, or some in memory.
#[derive(Debug)]
pub enum Blob {
    /// From a file, at an offset, so many.
    Stretch(File, u64, u64),
    /// These.
    Bytes(Vec<u8>),
}

impl Blob {
    /// A whole file of a known length.
    pub fn whole(file: File, bytes: u64) -> Blob {
        Blob::Stretch(file, 0, bytes)
    }

    fn len(&self) -> u64 {
        match self {
            Blob::Stretch(_, _, bytes) => *bytes,
            Blob::Bytes(bytes) => bytes.len() as u64,
        }
    }

    fn reader(&self) -> Box<dyn Read + '_> {
        match self {
            Blob::Stretch(file, from, bytes) => Box::new(Stretch { file, at: *from, left: *bytes }),
            Blob::Bytes(bytes) => Box::new(bytes.as_slice()),
        }
    }
}

/// Reads a stretch of a file by place, so that several can be read from one file.
pub struct Stretch<'a> {
    /// The file.
    pub file: &'a File,
    /// Where the next byte is.
    pub at: u64,
    /// How many there still are.
    pub left: u64,
}

impl Read for Stretch<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let wanted = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let read = self.file.read_at(&mut buffer[..wanted], self.at)?;
        if read == 0 && wanted > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += read as u64;
        self.left -= read as u64;
        Ok(read)
    }
}

/// An image that is put together.
#[derive(Debug)]
pub struct Layout {
    name: Reference,
    config: Config,
    layers: Vec<Descriptor>,
    blobs: BTreeMap<Digest, Blob>,
}

impl Layout {
    /// Without layers.
    pub fn new(name: Reference, config: Config) -> Self {
        Layout { name, config, layers: Vec::new(), blobs: BTreeMap::new() }
    }

    /// Puts a layer on top.
    pub fn push(&mut self, descriptor: Descriptor, blob: Blob) {
        self.blobs.insert(descriptor.digest.clone(), blob);
        self.layers.push(descriptor);
    }

    /// The layers, lowest first.
    pub fn layers(&self) -> &[Descriptor] {
        &self.layers
    }

    /// Writes the archive beside its final name and renames it. Returns the manifest's digest and the
    /// archive's length.
    pub fn write(mut self, out: &Path, dir: &Path) -> io::Result<(Digest, u64)> {
        let platform =
            Platform { architecture: self.config.architecture.clone(), os: self.config.os.clone() };
        let config = serde_json::to_value(&self.config)?;
        let config = self.document(MEDIA_CONFIG, &config)?;
        let legacy = self.legacy(&config);
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(MEDIA_MANIFEST.into()),
            config,
            layers: self.layers.clone(),
        };
        let mut manifest = self.document(MEDIA_MANIFEST, &serde_json::to_value(manifest)?)?;
        let digest = manifest.digest.clone();
        manifest.platform = Some(platform);
        manifest.annotations.insert(ANNOTATION_NAME.into(), self.name.qualified());
        manifest.annotations.insert(ANNOTATION_TAG.into(), self.name.tag().into());
        let index =
            Index { schema_version: 2, media_type: Some(MEDIA_INDEX.into()), manifests: vec![manifest] };

        let unfinished = tempfile::Builder::new()
            .prefix(".elasticdl-image-")
            .suffix(".unfinished")
            // What the umask leaves of it: an image is no secret.
            .permissions(Permissions::from_mode(0o666))
            .tempfile_in(dir)?;
        let mut tar = Builder::new(BufWriter::new(unfinished.as_file()));
        member(&mut tar, "oci-layout", &Blob::Bytes(br#"{"imageLayoutVersion":"1.0.0"}"#.into()))?;
        member(&mut tar, "index.json", &Blob::Bytes(serde_json::to_vec(&index)?))?;
        member(&mut tar, "manifest.json", &Blob::Bytes(serde_json::to_vec(&legacy)?))?;
        directory(&mut tar, "blobs/")?;
        directory(&mut tar, "blobs/sha256/")?;
        for (digest, blob) in &self.blobs {
            member(&mut tar, &path(digest), blob)?;
        }
        tar.into_inner()?.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        let bytes = unfinished.as_file().metadata()?.len();
        unfinished.persist(out).map_err(|e| e.error)?;
        Ok((digest, bytes))
    }

    /// Adds a JSON document to the parts.
    fn document(&mut self, media_type: &str, value: &Value) -> io::Result<Descriptor> {
        let bytes = serde_json::to_vec(value)?;
        let descriptor = Descriptor::new(media_type, Digest::of(&bytes), bytes.len() as u64);
        self.blobs.insert(descriptor.digest.clone(), Blob::Bytes(bytes));
        Ok(descriptor)
    }

    /// Docker's own way of saying what the image is.
    fn legacy(&self, config: &Descriptor) -> Value {
        let layers: Vec<String> = self.layers.iter().map(|layer| path(&layer.digest)).collect();
        json!([{ "Config": path(&config.digest), "RepoTags": [self.name.to_string()], "Layers": layers }])
    }
}

/// Where a part is in an archive.
pub fn path(digest: &Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

fn member(tar: &mut Builder<impl Write>, name: &str, blob: &Blob) -> io::Result<()> {
    let mut header = header(0o644);
    header.set_size(blob.len());
    tar.append_data(&mut header, name, blob.reader())
}

fn directory(tar: &mut Builder<impl Write>, name: &str) -> io::Result<()> {
    let mut header = header(0o755);
    header.set_entry_type(EntryType::Directory);
    header.set_size(0);
    tar.append_data(&mut header, name, io::empty())
}

fn header(mode: u32) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(mode);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}
