//! Files on their way into an image: what a layer holds, and packing it.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use super::archive::Descriptor;
use super::digest::{Digest, Hashed};
use crate::fault::Fault;

/// What a layer holds, by absolute path; parents come before what is in them.
#[derive(Debug, Clone, Default)]
pub struct Contents(BTreeMap<PathBuf, Node>);

/// What is at one path. Everything belongs to root; times are zero.
#[derive(Debug, Clone)]
pub enum Node {
    /// A directory.
    Directory {
        /// Its permissions.
        mode: u32,
    },
    /// A file.
    File {
        /// Its bytes.
        source: Source,
        /// Whether it can be started.
        executable: bool,
    },
    /// A symbolic link.
    Link(PathBuf),
}

/// Where a file's bytes come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// From a file of this machine.
    Disk(PathBuf),
    /// From here.
    Bytes(Vec<u8>),
}

/// A packed layer.
#[derive(Debug)]
pub struct Layer {
    /// The bytes, in a file without a name.
    pub blob: File,
    /// How many.
    pub bytes: u64,
    /// Their digest.
    pub digest: Digest,
    /// The digest of what they unpack to.
    pub diff_id: Digest,
}

const DIRECTORY: Node = Node::Directory { mode: 0o755 };
/// Images read names with this in front as "gone": a file of such a name would delete another one.
const WHITEOUT: &str = ".wh.";

impl Contents {
    /// Puts something at a path, and directories above it where there are none.
    pub fn insert(&mut self, path: &Path, node: Node) {
        for parent in path.ancestors().skip(1).filter(|parent| parent.parent().is_some()) {
            self.0.entry(parent.into()).or_insert(DIRECTORY);
        }
        self.0.insert(path.into(), node);
    }

    /// Puts a file, or all that is in a directory, at a path. Of permissions only "can be started" is kept,
    /// links are kept as links, and `skip` says what is passed over.
    pub fn add(&mut self, source: &Path, dest: &Path, skip: &dyn Fn(&Path) -> bool) -> anyhow::Result<()> {
        let meta = fs::metadata(source).with_context(|| format!("reading {}", source.display()))?;
        self.add_one(source, &meta, dest, skip)
    }

    fn add_one(
        &mut self,
        source: &Path,
        meta: &Metadata,
        dest: &Path,
        skip: &dyn Fn(&Path) -> bool,
    ) -> anyhow::Result<()> {
        let context = || format!("reading {}", source.display());
        if meta.is_dir() {
            if dest.parent().is_some() {
                self.insert(dest, DIRECTORY);
            }
            for entry in fs::read_dir(source).with_context(context)? {
                let entry = entry.with_context(context)?;
                if skip(&entry.path()) {
                    continue;
                }
                let meta = entry.metadata().with_context(|| format!("reading {}", entry.path().display()))?;
                self.add_one(&entry.path(), &meta, &dest.join(entry.file_name()), skip)?;
            }
            return Ok(());
        }
        let name = dest.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(WHITEOUT) {
            let what = format!("{} cannot be put into an image", source.display());
            return Err(Fault::user(what)
                .hint("names with .wh. in front stand for deleted files there")
                .into());
        }
        let node = if meta.is_symlink() {
            Node::Link(fs::read_link(source).with_context(context)?)
        } else if meta.is_file() {
            let executable = meta.permissions().mode() & 0o111 != 0;
            Node::File { source: Source::Disk(source.into()), executable }
        } else {
            let what = format!("{} is no file, directory or link", source.display());
            return Err(Fault::user(what).hint("an image cannot hold sockets, pipes and devices").into());
        };
        self.insert(dest, node);
        Ok(())
    }

    /// Takes all of another one; it wins where both have something.
    pub fn extend(&mut self, other: Contents) {
        self.0.extend(other.0);
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many files there are, and how many bytes in them. Packing finds out what cannot be read.
    pub fn size(&self) -> (u64, u64) {
        let files = self.0.values().filter_map(|node| match node {
            Node::File { source: Source::Bytes(bytes), .. } => Some(bytes.len() as u64),
            Node::File { source: Source::Disk(path), .. } => {
                Some(fs::metadata(path).map_or(0, |meta| meta.len()))
            }
            Node::Directory { .. } | Node::Link(_) => None,
        });
        files.fold((0, 0), |(count, all), bytes| (count + 1, all + bytes))
    }

    /// Everything, parents first.
    pub fn into_nodes(self) -> impl Iterator<Item = (PathBuf, Node)> {
        self.0.into_iter()
    }

    /// Puts something at a path whose parents are known to be there.
    pub fn insert_alone(&mut self, path: PathBuf, node: Node) {
        self.0.insert(path, node);
    }

    /// Packs everything into a file without a name in `scratch`.
    pub fn pack(&self, scratch: &Path) -> anyhow::Result<Layer> {
        let file = tempfile::tempfile_in(scratch)
            .with_context(|| format!("making a temporary file in {}", scratch.display()))?;
        let packed = GzEncoder::new(Hashed::new(BufWriter::new(file)), Compression::default());
        let mut tar = Builder::new(Hashed::new(packed));
        for (path, node) in &self.0 {
            append(&mut tar, path, node).with_context(|| format!("packing {}", path.display()))?;
        }
        let finish = || -> io::Result<Layer> {
            let (packed, diff_id, _) = tar.into_inner()?.finish();
            let (mut writer, digest, bytes) = packed.finish()?.finish();
            writer.flush()?;
            let mut blob = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
            blob.rewind()?;
            Ok(Layer { blob, bytes, digest, diff_id })
        };
        finish().context("packing a layer")
    }
}

impl Layer {
    /// What a manifest says about it.
    pub fn descriptor(&self, media_type: &str) -> Descriptor {
        Descriptor::new(media_type, self.digest.clone(), self.bytes)
    }
}

fn append(tar: &mut Builder<impl Write>, path: &Path, node: &Node) -> anyhow::Result<()> {
    let name = path.strip_prefix("/").context("paths in an image start with /")?;
    let mut header = Header::new_gnu();
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    match node {
        Node::Directory { mode } => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(*mode);
            // With nothing joined to it, a path ends with the slash that directories have in archives.
            tar.append_data(&mut header, name.join(""), io::empty())?;
        }
        Node::Link(target) => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            tar.append_link(&mut header, name, target)?;
        }
        Node::File { source, executable } => {
            header.set_mode(if *executable { 0o755 } else { 0o644 });
            match source {
                Source::Bytes(bytes) => append_file(tar, header, name, bytes.len() as u64, bytes.as_slice())?,
                Source::Disk(path) => {
                    let context = || format!("reading {}", path.display());
                    let file = File::open(path).with_context(context)?;
                    let bytes = file.metadata().with_context(context)?.len();
                    append_file(tar, header, name, bytes, file).with_context(context)?;
                }
            }
        }
    }
    Ok(())
}

/// The size stands before the bytes, so a file that changes meanwhile would spoil all that comes after it.
fn append_file(
    tar: &mut Builder<impl Write>,
    mut header: Header,
    name: &Path,
    bytes: u64,
    reader: impl Read,
) -> anyhow::Result<()> {
    header.set_size(bytes);
    let mut reader = reader.take(bytes);
    tar.append_data(&mut header, name, &mut reader)?;
    ensure!(reader.limit() == 0, io::Error::other("it became shorter while it was packed"));
    Ok(())
}
