//! Whole archives: everything that is named by digest is what its digest says, and the same input gives the
//! same bytes.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use serde_json::Value;
use tempfile::TempDir;

use super::archive::Index;
use super::elf::tests::program;
use super::layer::Contents;
use super::stored::Stored;
use super::{Recipe, digest::Digest};
use crate::fault::text;

/// A directory with a program that counts as static.
fn place() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("elasticdl"), program(62, None)).unwrap();
    dir
}

fn recipe(dir: &TempDir, name: &str) -> Recipe {
    Recipe {
        name: name.parse().unwrap(),
        binary: dir.path().join("elasticdl"),
        base: None,
        user: None,
        files: Contents::default(),
    }
}

/// All files of an archive by name.
fn members(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(File::open(path).unwrap());
    let entries = archive.entries().unwrap().map(Result::unwrap);
    let files = entries.filter(|entry| entry.header().entry_type().is_file());
    files
        .map(|mut entry| {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().display().to_string(), bytes)
        })
        .collect()
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// Follows a descriptor, and checks that what is there is what it says.
fn follow<'a>(members: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> &'a [u8] {
    let digest = descriptor["digest"].as_str().unwrap();
    let bytes = &members[&format!("blobs/{}", digest.replace(':', "/"))];
    assert_eq!(Digest::of(bytes).to_string(), digest);
    assert_eq!(bytes.len() as u64, descriptor["size"].as_u64().unwrap());
    bytes
}

/// One line per entry of a layer: kind and mode, owner, time, path.
fn listing(layer: &[u8]) -> Vec<String> {
    let mut tar = tar::Archive::new(GzDecoder::new(layer));
    let lines = tar.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        let header = entry.header();
        let kind = header.entry_type().as_byte() as char;
        let (mode, uid, gid) = (header.mode().unwrap(), header.uid().unwrap(), header.gid().unwrap());
        let path = entry.path().unwrap().display().to_string();
        format!("{kind} {mode:o} {uid}:{gid} {} {path}", header.mtime().unwrap())
    });
    lines.collect()
}

/// An archive's configuration and layers, with every digest on the way checked.
fn checked(path: &Path) -> (Value, Vec<Vec<String>>) {
    let members = members(path);
    assert_eq!(json(&members["oci-layout"])["imageLayoutVersion"], "1.0.0");
    let index = json(&members["index.json"]);
    assert_eq!(index["manifests"].as_array().unwrap().len(), 1);
    let manifest = json(follow(&members, &index["manifests"][0]));
    let config = json(follow(&members, &manifest["config"]));
    let layers = manifest["layers"].as_array().unwrap();
    let diff_ids = config["rootfs"]["diff_ids"].as_array().unwrap();
    assert_eq!(layers.len(), diff_ids.len());
    assert_eq!(config["history"].as_array().unwrap().len(), layers.len());
    let legacy = &json(&members["manifest.json"])[0];
    let path =
        |descriptor: &Value| format!("blobs/{}", descriptor["digest"].as_str().unwrap().replace(':', "/"));
    assert_eq!(legacy["Config"], path(&manifest["config"]));
    let mut listings = Vec::new();
    for (i, layer) in layers.iter().enumerate() {
        let bytes = follow(&members, layer);
        let (unpacked, _) = Digest::of_all(GzDecoder::new(bytes)).unwrap();
        assert_eq!(unpacked.to_string(), diff_ids[i].as_str().unwrap());
        assert_eq!(legacy["Layers"][i], path(layer));
        listings.push(listing(bytes));
    }
    // Parts that nothing names would be dead weight.
    assert_eq!(members.keys().filter(|name| name.starts_with("blobs/")).count(), layers.len() + 2);
    (config, listings)
}

#[test]
fn every_digest_and_size_is_right_and_both_ways_to_name_the_image_are_there() {
    let dir = place();
    let out = dir.path().join("made/here/image.tar");
    let written = recipe(&dir, "team/zoo:v1").write(&out).unwrap();
    let (config, layers) = checked(&out);
    assert_eq!((&config["architecture"], &config["os"]), (&"amd64".into(), &"linux".into()));
    assert_eq!(config["config"]["Entrypoint"], serde_json::json!(["/usr/local/bin/elasticdl"]));
    assert_eq!(config["config"]["User"], "65532:65532");
    assert_eq!(config["config"]["WorkingDir"], "/home/elasticdl");
    let members = members(&out);
    let annotations = &json(&members["index.json"])["manifests"][0]["annotations"];
    assert_eq!(annotations["io.containerd.image.name"], "docker.io/team/zoo:v1");
    assert_eq!(annotations["org.opencontainers.image.ref.name"], "v1");
    assert_eq!(json(&members["manifest.json"])[0]["RepoTags"], serde_json::json!(["team/zoo:v1"]));
    let wanted = [
        "5 755 0:0 0 etc/",
        "0 644 0:0 0 etc/passwd",
        "5 1777 0:0 0 home/elasticdl/",
        "5 1777 0:0 0 tmp/",
        "0 755 0:0 0 usr/local/bin/elasticdl",
    ];
    for line in wanted {
        assert!(layers[0].iter().any(|found| found == line), "{line} is not in {:#?}", layers[0]);
    }
    let facts = written.as_json();
    assert_eq!(facts["bytes"], fs::metadata(&out).unwrap().len());
    assert_eq!((&facts["linked"], &facts["platform"]), (&"static".into(), &"linux/amd64".into()));
    let left: Vec<_> = fs::read_dir(out.parent().unwrap()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["image.tar"], "nothing unfinished is left");
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let dir = place();
    let zoo = dir.path().join("zoo");
    let fill = |names: [&str; 3]| {
        let _ = fs::remove_dir_all(&zoo);
        fs::create_dir(&zoo).unwrap();
        for name in names {
            fs::write(zoo.join(name), name).unwrap();
        }
    };
    let image = |out: &str| {
        let mut recipe = recipe(&dir, "zoo:v1");
        recipe.files.add(&zoo, Path::new("/zoo"), &|_| false).unwrap();
        let out = dir.path().join(out);
        recipe.write(&out).unwrap();
        fs::read(out).unwrap()
    };
    fill(["a", "b", "c"]);
    let first = image("first.tar");
    fill(["c", "b", "a"]);
    assert!(first == image("second.tar"), "times and the order of writing leave no trace");
    fs::write(zoo.join("a"), "other").unwrap();
    assert!(first != image("third.tar"));
}

#[test]
fn files_of_ones_own_are_a_layer_of_their_own_with_modes_and_links() {
    let dir = place();
    let zoo = dir.path().join("zoo");
    fs::create_dir_all(zoo.join("deep/er")).unwrap();
    fs::write(zoo.join("job.yaml"), "spec").unwrap();
    fs::write(zoo.join("deep/er/run.sh"), "#!").unwrap();
    fs::set_permissions(zoo.join("deep/er/run.sh"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(zoo.join("secret"), "no").unwrap();
    symlink("job.yaml", zoo.join("link")).unwrap();
    let long = "n".repeat(150);
    fs::write(zoo.join(&long), "").unwrap();
    let mut recipe = recipe(&dir, "zoo:v1");
    recipe.files.add(&zoo, Path::new("/model_zoo"), &|path| path.ends_with("secret")).unwrap();
    let out = dir.path().join("zoo.tar");
    recipe.write(&out).unwrap();
    let (_, layers) = checked(&out);
    assert_eq!(layers.len(), 2);
    let wanted = [
        "5 755 0:0 0 model_zoo/",
        "5 755 0:0 0 model_zoo/deep/",
        "5 755 0:0 0 model_zoo/deep/er/",
        "0 755 0:0 0 model_zoo/deep/er/run.sh",
        "0 644 0:0 0 model_zoo/job.yaml",
        "2 777 0:0 0 model_zoo/link",
        &format!("0 644 0:0 0 model_zoo/{long}"),
    ];
    assert_eq!(layers[1], wanted);
}

#[test]
fn a_base_keeps_its_layers_its_user_and_what_it_has() {
    let dir = place();
    let base = dir.path().join("base.tar");
    let mut lower = recipe(&dir, "base:v1");
    lower.user = Some("7:8".into());
    lower.write(&base).unwrap();
    fs::write(dir.path().join("elasticdl"), [program(62, None), b"newer".to_vec()].concat()).unwrap();
    let mut upper = recipe(&dir, "upper:v1");
    upper.base = Some(base.clone());
    let out = dir.path().join("upper.tar");
    upper.write(&out).unwrap();
    let (config, layers) = checked(&out);
    assert_eq!(layers.len(), 2);
    assert_eq!(layers[0], checked(&base).1[0]);
    // The base has users, /tmp, certificates and all directories: only the program is new.
    assert_eq!(layers[1], ["0 755 0:0 0 usr/local/bin/elasticdl"]);
    assert_eq!(config["config"]["User"], "7:8");
    let env = config["config"]["Env"].as_array().unwrap();
    assert_eq!(env.iter().filter(|item| item.as_str().unwrap().starts_with("HOME=")).count(), 1);
}

#[test]
fn a_base_for_another_processor_or_with_damage_is_refused() {
    let dir = place();
    let base = dir.path().join("base.tar");
    recipe(&dir, "base:v1").write(&base).unwrap();
    let upon = |binary: Vec<u8>| {
        fs::write(dir.path().join("elasticdl"), binary).unwrap();
        let mut upper = recipe(&dir, "upper:v1");
        upper.base = Some(base.clone());
        text(&upper.write(&dir.path().join("upper.tar")).unwrap_err())
    };
    let other = upon(program(183, None));
    assert!(other.contains("it has no image for linux/arm64"), "{other}");

    let stored = Stored::open(&base).unwrap();
    let (_, manifest) = stored.image(None).unwrap();
    let layer = stored.reader(&manifest.layers[0].digest).unwrap();
    let mut bytes = fs::read(&base).unwrap();
    bytes[layer.at as usize + 100] ^= 1;
    fs::write(&base, bytes).unwrap();
    let damaged = upon(program(62, None));
    assert!(damaged.contains("is damaged: it is not what its digest says"), "{damaged}");
    assert!(!dir.path().join("upper.tar").exists());
}

#[test]
fn the_image_for_a_processor_is_found_in_an_index_of_an_index() {
    let dir = place();
    let path = dir.path().join("one.tar");
    recipe(&dir, "one:v1").write(&path).unwrap();
    let members = members(&path);
    // As `docker buildx` writes it: an index that names an index, in which a manifest without use comes first.
    let mut outer: Index = serde_json::from_slice(&members["index.json"]).unwrap();
    let mut inner: Index = serde_json::from_slice(&members["index.json"]).unwrap();
    let mut foreign = inner.manifests[0].clone();
    foreign.platform.as_mut().unwrap().architecture = "arm64".into();
    foreign.digest = Digest::of(b"not in the archive");
    inner.manifests.insert(0, foreign);
    let bytes = serde_json::to_vec(&inner).unwrap();
    outer.manifests[0].media_type = super::archive::MEDIA_INDEX.into();
    outer.manifests[0].digest = Digest::of(&bytes);
    outer.manifests[0].platform = None;
    let nested = dir.path().join("nested.tar");
    let mut tar = tar::Builder::new(File::create(&nested).unwrap());
    let mut put = |name: String, bytes: &[u8]| {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o644);
        tar.append_data(&mut header, PathBuf::from(name), bytes).unwrap();
    };
    put("index.json".into(), &serde_json::to_vec(&outer).unwrap());
    put(super::archive::path(&Digest::of(&bytes)), &bytes);
    for (name, bytes) in members.iter().filter(|(name, _)| name.starts_with("blobs/")) {
        put(name.clone(), bytes);
    }
    drop(tar);
    let (found, manifest) = Stored::open(&nested).unwrap().image(Some("amd64")).unwrap();
    assert_eq!(found.digest, Stored::open(&path).unwrap().image(None).unwrap().0.digest);
    assert_eq!(manifest.layers.len(), 1);
}

#[test]
fn what_cannot_be_in_an_image_is_told() {
    let dir = place();
    let mut files = Contents::default();
    fs::write(dir.path().join(".wh.elasticdl"), "").unwrap();
    let whiteout = files.add(dir.path(), Path::new("/x"), &|_| false).unwrap_err();
    assert!(text(&whiteout).contains("cannot be put into an image"), "{}", text(&whiteout));
    let device = files.add(Path::new("/dev/null"), Path::new("/x"), &|_| false).unwrap_err();
    assert!(text(&device).starts_with("error: /dev/null is no file, directory or link"));
    fs::write(dir.path().join("script"), "#!/bin/sh\n").unwrap();
    let mut script = recipe(&dir, "x:v1");
    script.binary = dir.path().join("script");
    let script = text(&script.write(&dir.path().join("x.tar")).unwrap_err());
    assert!(script.contains("cannot be the program of an image: it is no ELF file"), "{script}");
    let taken = text(&recipe(&dir, "x:v1").write(dir.path()).unwrap_err());
    assert!(taken.contains("is a directory"), "{taken}");
}
