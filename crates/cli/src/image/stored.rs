//! An image archive that exists: its parts by digest, checked when they are read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::de::DeserializeOwned;

use super::archive::{ANNOTATION_NAME, Blob, Descriptor, Index, Manifest, Stretch, path};
use super::digest::Digest;
use crate::fault::Fault;

/// A document longer than this is no document.
const DOCUMENT_BYTES_MAX: u64 = 64 << 20;
/// An index may name another one; deeper than this nobody goes.
const DEPTH_MAX: u32 = 3;

/// An archive, open for reading.
#[derive(Debug)]
pub struct Stored {
    file: File,
    path: PathBuf,
    /// Offset and length of every file in it.
    members: BTreeMap<PathBuf, (u64, u64)>,
}

impl Stored {
    /// Opens an archive and looks at what is where.
    pub fn open(file_path: &Path) -> anyhow::Result<Stored> {
        let context = || format!("reading the image archive {}", file_path.display());
        let file = File::open(file_path).with_context(context)?;
        let foreign = |why: &str| {
            let hint = "`elasticdl image`, `skopeo copy docker://NAME oci-archive:FILE`, `podman save --format \
                        oci-archive` and `docker save` (from Docker 25 on) make one";
            Fault::user(format!("{} is no OCI image archive: {why}", file_path.display())).hint(hint)
        };
        let members = members(&file).map_err(|_| foreign("it is no tar file, or not a whole one"))?;
        if !members.contains_key(Path::new("index.json")) {
            return Err(foreign("it has no index.json").into());
        }
        Ok(Stored { file, path: file_path.into(), members })
    }

    /// The image for a processor, where it matters; with its own descriptor.
    pub fn image(&self, architecture: Option<&str>) -> anyhow::Result<(Descriptor, Manifest)> {
        let bytes = self.read(Path::new("index.json"))?;
        let index: Index = self.parse("index.json", &bytes)?;
        let found = self.find(&index, architecture, 0)?;
        let (descriptor, bytes) = found.ok_or_else(|| {
            let wanted = architecture.map(|name| format!(" for linux/{name}")).unwrap_or_default();
            self.fault(&format!("it has no image{wanted}"))
        })?;
        let manifest = self.parse("the manifest", &bytes)?;
        Ok((descriptor, manifest))
    }

    /// The image's name, as the archive says it.
    pub fn name(&self, image: &Descriptor) -> Option<String> {
        image.annotations.get(ANNOTATION_NAME).cloned()
    }

    /// A document that a descriptor names; its digest is checked.
    pub fn document(&self, descriptor: &Descriptor) -> anyhow::Result<Vec<u8>> {
        let bytes = self.read(Path::new(&path(&descriptor.digest)))?;
        if Digest::of(&bytes) != descriptor.digest {
            return Err(self.damaged(descriptor).into());
        }
        Ok(bytes)
    }

    /// Fails where a part is not what its descriptor says.
    pub fn verify(&self, descriptor: &Descriptor) -> anyhow::Result<()> {
        let (digest, bytes) = Digest::of_all(self.reader(&descriptor.digest)?)
            .with_context(|| format!("reading {}", self.path.display()))?;
        if digest != descriptor.digest || bytes != descriptor.size {
            return Err(self.damaged(descriptor).into());
        }
        Ok(())
    }

    /// The bytes of a part.
    pub fn reader(&self, digest: &Digest) -> anyhow::Result<Stretch<'_>> {
        let (at, left) = self.place(Path::new(&path(digest)))?;
        Ok(Stretch { file: &self.file, at, left })
    }

    /// A part, to be copied into another archive.
    pub fn blob(&self, digest: &Digest) -> anyhow::Result<Blob> {
        let (at, bytes) = self.place(Path::new(&path(digest)))?;
        let file = self.file.try_clone().with_context(|| format!("reading {}", self.path.display()))?;
        Ok(Blob::Stretch(file, at, bytes))
    }

    /// Parses a document of the archive.
    pub fn parse<T: DeserializeOwned>(&self, what: &str, bytes: &[u8]) -> anyhow::Result<T> {
        serde_json::from_slice(bytes)
            .map_err(|e| self.fault(&format!("{what} cannot be read")).because(e).into())
    }

    fn find(
        &self,
        index: &Index,
        architecture: Option<&str>,
        depth: u32,
    ) -> anyhow::Result<Option<(Descriptor, Vec<u8>)>> {
        for descriptor in &index.manifests {
            let fits = descriptor.platform.as_ref().is_none_or(|platform| {
                platform.os == "linux" && architecture.is_none_or(|wanted| platform.architecture == wanted)
            });
            if !fits {
                continue;
            }
            let bytes = self.document(descriptor)?;
            // Docker's own name for an index is "manifest list".
            let nested = descriptor.media_type.contains("index") || descriptor.media_type.contains("list");
            if !nested {
                return Ok(Some((descriptor.clone(), bytes)));
            }
            if depth < DEPTH_MAX {
                let index: Index = self.parse("an index", &bytes)?;
                if let Some((mut found, bytes)) = self.find(&index, architecture, depth + 1)? {
                    found.annotations.extend(descriptor.annotations.clone());
                    return Ok(Some((found, bytes)));
                }
            }
        }
        Ok(None)
    }

    fn read(&self, name: &Path) -> anyhow::Result<Vec<u8>> {
        let (at, left) = self.place(name)?;
        if left > DOCUMENT_BYTES_MAX {
            return Err(self.fault(&format!("{} is too long for a document", name.display())).into());
        }
        let mut bytes = Vec::new();
        let mut reader = Stretch { file: &self.file, at, left };
        reader.read_to_end(&mut bytes).with_context(|| format!("reading {}", self.path.display()))?;
        Ok(bytes)
    }

    fn place(&self, name: &Path) -> anyhow::Result<(u64, u64)> {
        let place = self.members.get(name).copied();
        place.ok_or_else(|| self.fault(&format!("{} is missing", name.display())).into())
    }

    fn damaged(&self, descriptor: &Descriptor) -> Fault {
        self.fault(&format!("{} is damaged: it is not what its digest says", path(&descriptor.digest)))
    }

    fn fault(&self, why: &str) -> Fault {
        Fault::user(format!("the image archive {} cannot be used: {why}", self.path.display()))
            .hint("make the archive again")
    }
}

/// Offset and length of every file in a tar file.
fn members(file: &File) -> io::Result<BTreeMap<PathBuf, (u64, u64)>> {
    let mut members = BTreeMap::new();
    let mut tar = tar::Archive::new(file);
    for entry in tar.entries_with_seek()? {
        let entry = entry?;
        if entry.header().entry_type().is_file() {
            let name = entry.path()?;
            let name = name.strip_prefix(".").map_or(name.to_path_buf(), Path::to_path_buf);
            members.insert(name, (entry.raw_file_position(), entry.size()));
        }
    }
    Ok(members)
}
