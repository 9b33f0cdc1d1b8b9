//! Container images without a container engine: a program, the little that it needs around it, and files of
//! one's own become an OCI image archive that `ctr`, `docker`, `podman` and `skopeo` take.
//!
//! - [`Recipe`] says what goes in; [`Recipe::write`] makes the archive.
//! - [`layer`] packs files, [`archive`] writes the layout around layers, [`stored`] reads one again.
//! - [`elf`] and [`libraries`] find out what a program needs to run alone; [`furniture`] is the rest.
//! - [`base`] knows what an image that is built upon holds already.
//! - [`reference`] is an image's name, [`digest`] that of its parts; [`command`] is `elasticdl image`.
//!
//! The same input gives the same bytes: no clock, no owner and no order of directories gets into an image.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use self::archive::{Blob, Config, Layout, MEDIA_LAYER};
use self::base::Base;
use self::digest::Digest;
use self::elf::Program;
use self::layer::{Contents, Layer, Node, Source};
use self::reference::Reference;
use crate::fault::Fault;
use crate::print;

pub mod archive;
mod base;
pub mod command;
pub mod digest;
mod elf;
pub mod furniture;
pub mod layer;
mod libraries;
pub mod reference;
pub mod stored;
#[cfg(test)]
mod tests;

/// Where the program is in an image.
pub const PROGRAM: &str = "/usr/local/bin/elasticdl";
/// The user and the group of an image that says nothing else. Not root: clusters often refuse that.
pub const USER: u32 = 65532;

/// What an image is made of.
#[derive(Debug)]
pub struct Recipe {
    /// Its name.
    pub name: Reference,
    /// The program that it starts.
    pub binary: PathBuf,
    /// An archive with the image to build upon.
    pub base: Option<PathBuf>,
    /// UID:GID that it runs as; by default that of the base, or else [`USER`].
    pub user: Option<String>,
    /// Files for a layer of their own, so that a change of them leaves the program's layer as it is.
    pub files: Contents,
}

/// An image that was written.
#[derive(Debug)]
pub struct Written {
    name: Reference,
    path: PathBuf,
    architecture: &'static str,
    manifest: Digest,
    bytes: u64,
    user: String,
    layers: Vec<(Digest, u64)>,
    libraries: Vec<PathBuf>,
    linked: Linked,
}

/// How the program gets at its libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Linked {
    /// They are in it.
    Static,
    /// They are files in the image.
    Dynamic,
    /// They are files in the image, and where its base had them, they are the base's.
    DynamicOnBase,
}

impl Recipe {
    /// Writes the image to `out`, whole or not at all.
    pub fn write(self, out: &Path) -> anyhow::Result<Written> {
        let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        if out.is_dir() {
            let what = format!("--out {} is a directory", out.display());
            return Err(Fault::user(what).hint("name the file to write, for example image.tar").into());
        }
        let program = Program::read(&self.binary)?;
        let libraries = match &program.interpreter {
            Some(interpreter) => libraries::of(&self.binary, interpreter)?,
            None => Vec::new(),
        };
        let linked = match (&program.interpreter, &self.base) {
            (None, _) => Linked::Static,
            (Some(_), None) => Linked::Dynamic,
            (Some(_), Some(_)) => Linked::DynamicOnBase,
        };
        let base = self.base.as_deref().map(|path| Base::open(path, program.architecture)).transpose()?;
        let (layers, config) = self.layers(&libraries, base.as_ref(), dir)?;
        let config = config.finish(program.architecture, &layers);
        let user = config.user().to_string();
        let mut layout = Layout::new(self.name.clone(), config);
        for (descriptor, blob) in base.map(Base::into_layers).into_iter().flatten() {
            layout.push(descriptor, blob);
        }
        for layer in layers {
            layout.push(layer.descriptor(MEDIA_LAYER), Blob::whole(layer.blob, layer.bytes));
        }
        let sizes = layout.layers().iter().map(|layer| (layer.digest.clone(), layer.size)).collect();
        let (manifest, bytes) =
            layout.write(out, dir).with_context(|| format!("writing {}", out.display()))?;
        Ok(Written {
            name: self.name,
            path: out.into(),
            architecture: program.architecture,
            manifest,
            bytes,
            user,
            layers: sizes,
            libraries,
            linked,
        })
    }

    /// The layers that are ours, and the configuration that they go with.
    fn layers(
        &self,
        libraries: &[PathBuf],
        base: Option<&Base>,
        scratch: &Path,
    ) -> anyhow::Result<(Vec<Layer>, Config)> {
        let mut around = furniture::contents();
        for library in libraries {
            around.insert(library, Node::File { source: Source::Disk(library.clone()), executable: true });
        }
        let mut program = Contents::default();
        program.insert(
            Path::new(PROGRAM),
            Node::File { source: Source::Disk(self.binary.clone()), executable: true },
        );
        let mut files = self.files.clone();
        let mut config = match base {
            Some(base) => {
                // What the base has stays as it is: its tools run with its own libraries and users.
                around = base.tree().lacking(around);
                program = base.tree().rebased(program);
                files = base.tree().rebased(files);
                base.config()
            }
            None => Config::bare(),
        };
        program.extend(around);
        if let Some(user) = &self.user {
            config.set_user(user);
        }
        let packed = [program, files].into_iter().filter(|contents| !contents.is_empty());
        let mut layers = Vec::new();
        for contents in packed {
            let (files, bytes) = contents.size();
            let many = if files == 1 { "file" } else { "files" };
            print::note(&format!("packing {} {many}, {}", print::count(files), print::bytes(bytes)));
            layers.push(contents.pack(scratch)?);
        }
        Ok((layers, config))
    }
}

impl Written {
    /// For programs.
    pub fn as_json(&self) -> Value {
        let layers: Vec<Value> = self
            .layers
            .iter()
            .map(|(digest, bytes)| json!({ "digest": digest.to_string(), "bytes": bytes }))
            .collect();
        json!({
            "path": self.path,
            "name": self.name.to_string(),
            "platform": format!("linux/{}", self.architecture),
            "digest": self.manifest.to_string(),
            "bytes": self.bytes,
            "user": self.user,
            "layers": layers,
            "linked": if self.linked == Linked::Static { "static" } else { "dynamic" },
            "libraries": self.libraries,
        })
    }

    /// Tells a person on stderr, or a program on stdout.
    pub fn tell(&self, json: bool) -> anyhow::Result<()> {
        if json {
            return Ok(print::line(&self.as_json().to_string())?);
        }
        let layers =
            if self.layers.len() == 1 { "1 layer".into() } else { format!("{} layers", self.layers.len()) };
        let (bytes, platform) = (print::bytes(self.bytes), self.architecture);
        let path = self.path.display();
        print::note(&format!("{path}: {}, linux/{platform}, {layers}, {bytes}", self.name));
        let names: Vec<_> = self.libraries.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        let names = names.join(", ");
        print::note(&match self.linked {
            Linked::Static => "the program is static and needs nothing around it".to_string(),
            Linked::Dynamic => format!("with the shared libraries of this machine: {names}"),
            Linked::DynamicOnBase => {
                format!("with the shared libraries of the base, or else of this machine: {names}")
            }
        });
        print::note(&format!("runs as user {}; digest {}", self.user, self.manifest));
        Ok(())
    }
}
