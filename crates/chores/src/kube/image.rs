//! OCI images of one layer, written as archives that containerd imports. No registry is asked.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use super::places::{Places, make_directory};
use super::process::output;

/// The first process of every pod.
pub const PAUSE: &str = "testcluster.local/pause:1";
/// A shell and small tools, for trying things.
pub const BUSYBOX: &str = "testcluster.local/busybox:1";

const BUSYBOX_PROGRAM: &str = "/bin/busybox";

/// What an image holds.
#[derive(Debug, Default)]
pub struct Image {
    /// With its tag.
    pub name: String,
    /// Programs: the path inside and where the content comes from.
    pub programs: Vec<(String, PathBuf)>,
    /// Symbolic links: the path inside and what it points to.
    pub links: Vec<(String, String)>,
    /// Empty directories anybody may write to.
    pub directories: Vec<String>,
    /// What runs where a pod says nothing.
    pub entrypoint: Vec<String>,
}

/// Makes the archives that every node gets, and returns them.
pub fn base_images(places: &Places, binaries: &Path) -> Result<Vec<PathBuf>> {
    let images = [("pause", pause(binaries)), ("busybox", busybox()?)];
    let mut archives = Vec::new();
    for (file, image) in images {
        let archive = places.images().join(format!("{file}.tar"));
        image.write(&archive)?;
        archives.push(archive);
    }
    Ok(archives)
}

fn pause(binaries: &Path) -> Image {
    Image {
        name: PAUSE.into(),
        programs: vec![("pause".into(), binaries.join("pause"))],
        entrypoint: vec!["/pause".into()],
        ..Image::default()
    }
}

fn busybox() -> Result<Image> {
    let applets = output(Command::new(BUSYBOX_PROGRAM).arg("--list").stdout(Stdio::piped()))?;
    let link = |applet: &str| (format!("bin/{applet}"), "busybox".to_owned());
    Ok(Image {
        name: BUSYBOX.into(),
        programs: vec![("bin/busybox".into(), BUSYBOX_PROGRAM.into())],
        links: applets.lines().filter(|&applet| applet != "busybox").map(link).collect(),
        directories: vec!["tmp".into()],
        ..Image::default()
    })
}

impl Image {
    /// Writes the archive. The same content gives the same bytes.
    pub fn write(&self, archive: &Path) -> Result<()> {
        let layer = self.layer()?;
        let blobs = self.blobs(layer);
        if let Some(parent) = archive.parent() {
            make_directory(parent)?;
        }
        let partial = archive.with_extension("partial");
        let file = File::create(&partial).with_context(|| format!("create {}", partial.display()))?;
        let mut tar = Builder::new(file);
        for (name, content) in &blobs {
            add(&mut tar, name, 0o644, content)?;
        }
        tar.finish().with_context(|| format!("write {}", partial.display()))?;
        fs::rename(&partial, archive).with_context(|| format!("rename {}", partial.display()))
    }

    fn layer(&self) -> Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        for directory in &self.directories {
            let mut header = header(EntryType::Directory, 0o1777, 0);
            tar.append_data(&mut header, directory, &[][..]).context("add a directory")?;
        }
        for (inside, source) in &self.programs {
            let content = fs::read(source).with_context(|| format!("read {}", source.display()))?;
            add(&mut tar, inside, 0o755, &content)?;
        }
        for (inside, target) in &self.links {
            let mut header = header(EntryType::Symlink, 0o777, 0);
            tar.append_link(&mut header, inside, target).with_context(|| format!("link {inside}"))?;
        }
        tar.into_inner().context("finish the layer")
    }

    /// The files of an OCI layout: the index names the manifest, which names the configuration and the layer.
    fn blobs(&self, layer: Vec<u8>) -> Vec<(String, Vec<u8>)> {
        let mut config = json!({
            "architecture": "amd64",
            "os": "linux",
            "config": { "Env": ["PATH=/bin:/usr/bin:/sbin:/usr/sbin"] },
            "rootfs": { "type": "layers", "diff_ids": [sha256(&layer)] },
        });
        if !self.entrypoint.is_empty() {
            config["config"]["Entrypoint"] = json!(self.entrypoint);
        }
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut listed = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        listed["annotations"] = json!({ "io.containerd.image.name": self.name });
        let index = json!({ "schemaVersion": 2, "manifests": [listed] });
        let blob = |content: Vec<u8>| (format!("blobs/{}", sha256(&content).replace(':', "/")), content);
        vec![
            ("oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#.to_vec()),
            ("index.json".into(), index.to_string().into_bytes()),
            blob(config),
            blob(manifest),
            blob(layer),
        ]
    }
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": sha256(content), "size": content.len() })
}

/// `sha256:` and 64 hexadecimal digits
fn sha256(content: &[u8]) -> String {
    let digits =
        digest(&SHA256, content).as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("sha256:{digits}")
}

fn add(tar: &mut Builder<impl Write>, name: &str, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = header(EntryType::Regular, mode, content.len() as u64);
    tar.append_data(&mut header, name, content).with_context(|| format!("add {name}"))
}

fn header(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read;

    use super::*;

    /// Every file of an archive, by its name.
    fn unpack(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), content);
        }
        files
    }

    #[test]
    fn an_archive_leads_from_the_index_to_the_program() {
        let directory = tempfile::tempdir().unwrap();
        let (program, archive) = (directory.path().join("hello"), directory.path().join("hello.tar"));
        fs::write(&program, "#!").unwrap();
        let image = Image {
            name: "local/hello:2".into(),
            programs: vec![("bin/hello".into(), program)],
            links: vec![("bin/hi".into(), "hello".into())],
            directories: vec!["tmp".into()],
            entrypoint: vec!["/bin/hello".into()],
        };
        image.write(&archive).unwrap();

        let files = unpack(&fs::read(&archive).unwrap());
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            let content = files[&format!("blobs/{}", digest.replace(':', "/"))].clone();
            assert_eq!(sha256(&content), digest);
            assert_eq!(content.len() as u64, descriptor["size"].as_u64().unwrap());
            content
        };
        let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
        assert_eq!(index["manifests"][0]["annotations"]["io.containerd.image.name"], "local/hello:2");
        let manifest: Value = serde_json::from_slice(&blob(&index["manifests"][0])).unwrap();
        let config: Value = serde_json::from_slice(&blob(&manifest["config"])).unwrap();
        assert_eq!(config["config"]["Entrypoint"], json!(["/bin/hello"]));
        let layer = blob(&manifest["layers"][0]);
        assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        let inside = unpack(&layer);
        assert_eq!(inside["bin/hello"], b"#!");
        assert_eq!(inside.keys().collect::<Vec<_>>(), ["bin/hello", "bin/hi", "tmp"]);
    }

    #[test]
    fn digests_are_sha256() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256(b""), empty);
    }
}
