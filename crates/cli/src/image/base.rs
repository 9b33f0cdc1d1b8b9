//! An image to build upon: its layers, its configuration, and which paths it has.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use anyhow::Context;
use flate2::read::MultiGzDecoder;

use super::archive::{Blob, Config, Descriptor, MEDIA_LAYER};
use super::layer::{Contents, Node};
use super::stored::Stored;
use crate::fault::Fault;

/// A base.
#[derive(Debug)]
pub struct Base {
    layers: Vec<(Descriptor, Blob)>,
    config: Config,
    tree: Tree,
}

impl Base {
    /// Opens an archive, checks every digest of the image for this processor, and looks into its layers.
    pub fn open(path: &Path, architecture: &str) -> anyhow::Result<Base> {
        let stored = Stored::open(path)?;
        let (_, manifest) = stored.image(Some(architecture))?;
        let config: Config = stored.parse("the configuration", &stored.document(&manifest.config)?)?;
        if config.architecture != architecture {
            let (base, program) = (&config.architecture, architecture);
            let what = format!("{} is for linux/{base}, and the program for linux/{program}", path.display());
            return Err(Fault::user(what).hint("use a base for the program's processor").into());
        }
        let (mut layers, mut tree) = (Vec::new(), Tree::default());
        for mut descriptor in manifest.layers {
            stored.verify(&descriptor)?;
            let entries = unpacked(stored.reader(&descriptor.digest)?).and_then(entries);
            tree.apply(
                entries
                    .with_context(|| format!("reading layer {} of {}", descriptor.digest, path.display()))?,
            );
            descriptor.media_type = standard(&descriptor.media_type);
            let blob = stored.blob(&descriptor.digest)?;
            layers.push((descriptor, blob));
        }
        Ok(Base { layers, config, tree })
    }

    /// Its layers, lowest first.
    pub fn into_layers(self) -> Vec<(Descriptor, Blob)> {
        self.layers
    }

    /// How it is started.
    pub fn config(&self) -> Config {
        self.config.clone()
    }

    /// Which paths it has.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }
}

/// The standard's name for a layer's type, where Docker has its own.
fn standard(media_type: &str) -> String {
    match media_type {
        "application/vnd.docker.image.rootfs.diff.tar.gzip" => MEDIA_LAYER.into(),
        "application/vnd.docker.image.rootfs.diff.tar" => "application/vnd.oci.image.layer.v1.tar".into(),
        other => other.into(),
    }
}

/// A layer's bytes as a tar file, whichever way they are packed.
fn unpacked<'a>(mut reader: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut magic = Vec::new();
    reader.by_ref().take(4).read_to_end(&mut magic)?;
    let packed = magic.clone();
    let whole = io::Cursor::new(magic).chain(reader);
    Ok(match packed.as_slice() {
        [0x1f, 0x8b, ..] => Box::new(MultiGzDecoder::new(io::BufReader::new(whole))),
        [0x28, 0xb5, 0x2f, 0xfd] => Box::new(zstd::Decoder::new(whole)?),
        _ => Box::new(whole),
    })
}

/// Paths and what is there, in the order of a tar file.
fn entries(reader: impl Read) -> io::Result<Vec<(PathBuf, Kind)>> {
    let mut tar = tar::Archive::new(reader);
    let mut entries = Vec::new();
    for entry in tar.entries()? {
        let entry = entry?;
        let kind = match entry.header().entry_type() {
            tar::EntryType::Directory => Kind::Directory,
            tar::EntryType::Symlink => Kind::Link(entry.link_name()?.unwrap_or_default().into_owned()),
            _ => Kind::File,
        };
        entries.push((normal(&entry.path()?), kind));
    }
    Ok(entries)
}

/// An absolute path without `.` and `..`.
fn normal(path: &Path) -> PathBuf {
    let mut whole = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => whole.push(name),
            Component::ParentDir => _ = whole.pop(),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    whole
}

/// What is at a path of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Directory,
    File,
    Link(PathBuf),
}

/// The paths of an image, with all layers put together.
#[derive(Debug, Default)]
pub struct Tree(BTreeMap<PathBuf, Kind>);

/// After so many links a path is taken for a circle, as the kernel does.
const LINKS_MAX: u32 = 40;

impl Tree {
    /// Puts a layer on top: first what it deletes below it, then what it brings.
    fn apply(&mut self, entries: Vec<(PathBuf, Kind)>) {
        let mut brought = Vec::new();
        for (path, kind) in entries {
            let name = path.file_name().unwrap_or_default().as_bytes();
            match (name.strip_prefix(b".wh."), path.parent()) {
                (Some(b".wh..opq"), Some(dir)) => self.0.retain(|p, _| p == dir || !p.starts_with(dir)),
                (Some(gone), Some(dir)) => {
                    let gone = dir.join(OsStr::from_bytes(gone));
                    self.0.retain(|p, _| !p.starts_with(&gone));
                }
                _ => brought.push((path, kind)),
            }
        }
        for (path, kind) in brought {
            let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
                continue;
            };
            let dir = self.followed(dir);
            let place = dir.join(name);
            if kind != Kind::Directory && self.0.get(&place) == Some(&Kind::Directory) {
                self.0.retain(|p, _| !p.starts_with(&place));
            }
            self.0.insert(place, kind);
            // A layer need not name the directories that its files are in.
            for dir in dir.ancestors().filter(|dir| dir.parent().is_some()) {
                self.0.entry(dir.into()).or_insert(Kind::Directory);
            }
        }
    }

    /// What the image lacks of these.
    pub fn lacking(&self, contents: Contents) -> Contents {
        let mut lacking = Contents::default();
        for (path, node) in contents.into_nodes() {
            let path = self.followed(&path);
            if !self.0.contains_key(&path) {
                lacking.insert_alone(path, node);
            }
        }
        lacking
    }

    /// These, with the image's own links followed and without the directories that it has. A directory in
    /// a layer that is a link below it (`/lib` is one on many systems) would replace the link.
    pub fn rebased(&self, contents: Contents) -> Contents {
        let mut rebased = Contents::default();
        for (path, node) in contents.into_nodes() {
            let place = self.followed(&path);
            match node {
                Node::Directory { .. } if self.0.get(&place) == Some(&Kind::Directory) => {}
                node @ Node::Directory { .. } => rebased.insert_alone(place, node),
                // A link in the way of a file is replaced; only those above it are followed.
                node => {
                    let dir = self.followed(path.parent().unwrap_or(Path::new("/")));
                    rebased.insert_alone(dir.join(path.file_name().unwrap_or_default()), node);
                }
            }
        }
        rebased
    }

    /// A path with all links on the way followed.
    fn followed(&self, path: &Path) -> PathBuf {
        let mut links = 0;
        let mut left: Vec<PathBuf> = parts(path);
        let mut place = PathBuf::from("/");
        while let Some(part) = left.pop() {
            if part.as_os_str() == ".." {
                place.pop();
                continue;
            }
            let next = place.join(&part);
            match self.0.get(&next) {
                Some(Kind::Link(target)) if links < LINKS_MAX => {
                    links += 1;
                    if target.is_absolute() {
                        place = PathBuf::from("/");
                    }
                    left.extend(parts(target));
                }
                _ => place = next,
            }
        }
        place
    }
}

/// The names in a path, the last one first.
fn parts(path: &Path) -> Vec<PathBuf> {
    let kept = |part: &Component| matches!(part, Component::Normal(_) | Component::ParentDir);
    path.components().filter(kept).map(|part| PathBuf::from(part.as_os_str())).rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::layer::Source;

    fn file() -> Node {
        Node::File { source: Source::Bytes(Vec::new()), executable: false }
    }

    fn tree(layers: &[&[(&str, Kind)]]) -> Tree {
        let mut tree = Tree::default();
        for layer in layers {
            tree.apply(layer.iter().map(|(path, kind)| (PathBuf::from(path), kind.clone())).collect());
        }
        tree
    }

    fn paths(contents: Contents) -> Vec<String> {
        contents.into_nodes().map(|(path, _)| path.display().to_string()).collect()
    }

    #[test]
    fn a_deleted_path_is_lacking_again() {
        let tree = tree(&[
            &[("/etc", Kind::Directory), ("/etc/passwd", Kind::File), ("/etc/group", Kind::File)],
            &[("/etc/.wh.passwd", Kind::File)],
        ]);
        let mut wanted = Contents::default();
        wanted.insert(Path::new("/etc/passwd"), file());
        wanted.insert(Path::new("/etc/group"), file());
        assert_eq!(paths(tree.lacking(wanted)), ["/etc/passwd"]);
    }

    #[test]
    fn an_opaque_directory_loses_what_is_below_it_and_keeps_what_comes_with_it() {
        let tree = tree(&[
            &[("/data", Kind::Directory), ("/data/old", Kind::File)],
            &[("/data/new", Kind::File), ("/data/.wh..wh..opq", Kind::File)],
        ]);
        let known: Vec<_> = tree.0.keys().map(|path| path.display().to_string()).collect();
        assert_eq!(known, ["/data", "/data/new"]);
    }

    #[test]
    fn files_go_to_where_the_links_of_the_base_lead() {
        let tree = tree(&[&[
            ("/usr", Kind::Directory),
            ("/usr/lib", Kind::Directory),
            ("/lib", Kind::Link("usr/lib".into())),
            ("/a", Kind::Link("/b".into())),
            ("/b", Kind::Link("a".into())),
        ]]);
        let mut files = Contents::default();
        files.insert(Path::new("/lib/x/libc.so.6"), file());
        assert_eq!(paths(tree.rebased(files)), ["/usr/lib/x", "/usr/lib/x/libc.so.6"]);
        let mut circle = Contents::default();
        circle.insert(Path::new("/a/file"), file());
        assert_eq!(paths(tree.rebased(circle)).len(), 2);
    }

    #[test]
    fn a_layer_writes_through_links_below_it_and_implies_directories() {
        let tree = tree(&[
            &[
                ("/usr", Kind::Directory),
                ("/usr/lib", Kind::Directory),
                ("/lib", Kind::Link("usr/lib".into())),
            ],
            &[("/lib/a/b.so", Kind::File)],
        ]);
        let known: Vec<_> = tree.0.keys().map(|path| path.display().to_string()).collect();
        assert_eq!(known, ["/lib", "/usr", "/usr/lib", "/usr/lib/a", "/usr/lib/a/b.so"]);
    }
}
