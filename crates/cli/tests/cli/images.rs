//! Images without Docker: made, unpacked and run, and pushed to a registry.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::Command;

use flate2::read::GzDecoder;
use serde_json::Value;

use super::registry::{Registry, digest_of};
use super::world::{World, said};

/// A program that counts as static, so that images of it are small and quick to make.
fn tiny_program(world: &World) {
    let mut bytes = vec![0u8; 120];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[18] = 62;
    bytes[24] = 1;
    bytes[32] = 64;
    bytes[54] = 56;
    bytes[56] = 1;
    fs::write(world.path("tiny"), bytes).unwrap();
}

/// A world with `zoo-v1.tar`, whose name is `team/zoo:v1`.
fn world_with_image() -> World {
    let world = World::new();
    tiny_program(&world);
    world.run(&["zoo", "init", "zoo"]).ok();
    world.run(&["zoo", "build", "zoo", "--image", "team/zoo:v1", "--binary", "tiny"]).ok();
    world
}

/// All files of an archive by name.
fn members(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(File::open(path).unwrap());
    let mut members = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        members.insert(entry.path().unwrap().display().to_string(), bytes);
    }
    members
}

fn blob<'a>(members: &'a BTreeMap<String, Vec<u8>>, descriptor: &Value) -> &'a [u8] {
    let digest = descriptor["digest"].as_str().unwrap();
    &members[&format!("blobs/{}", digest.replace(':', "/"))]
}

fn manifest(members: &BTreeMap<String, Vec<u8>>) -> Value {
    let index: Value = serde_json::from_slice(&members["index.json"]).unwrap();
    serde_json::from_slice(blob(members, &index["manifests"][0])).unwrap()
}

/// Unpacks an image as an engine would.
fn unpack(image: &Path, root: &Path) {
    let members = members(image);
    for layer in manifest(&members)["layers"].as_array().unwrap() {
        let mut tar = tar::Archive::new(GzDecoder::new(blob(&members, layer)));
        tar.set_preserve_permissions(true);
        tar.unpack(root).unwrap();
    }
}

/// `push` to a registry on this machine, with a Docker configuration that the test wrote, or none.
fn push(world: &World, registry: &Registry, image: &str) -> super::world::Said {
    let args = ["zoo", "push", image, "--registry", &registry.address, "--insecure", "--json"];
    said(world.command(&args).env("DOCKER_CONFIG", world.path("docker")))
}

fn log_in(world: &World, registry: &Registry, auth: &str) {
    let config = serde_json::json!({ "auths": { &registry.address: { "auth": auth } } });
    world.write("docker/config.json", &config.to_string());
}

#[test]
fn the_program_runs_alone_in_its_image() {
    let world = World::new();
    world.run(&["zoo", "init", "zoo"]).ok();
    let built = world.run(&["zoo", "build", "zoo", "--image", "zoo:v1", "--json"]);
    let facts = built.last_json();
    assert_eq!((&facts["path"], &facts["user"]), (&"zoo-v1.tar".into(), &"65532:65532".into()));
    assert_eq!(facts["layers"].as_array().unwrap().len(), 2);
    assert_eq!(facts["bytes"], fs::metadata(world.path("zoo-v1.tar")).unwrap().len());
    let libraries = facts["libraries"].as_array().unwrap();
    assert_eq!(facts["linked"] == "dynamic", !libraries.is_empty(), "{facts}");

    if !rustix::process::geteuid().is_root() || Command::new("chroot").arg("--version").output().is_err() {
        eprintln!("skipped: only root can run a program in another root directory");
        return;
    }
    let root = world.path("root");
    unpack(&world.path("zoo-v1.tar"), &root);
    assert!(!root.join("model_zoo/Dockerfile").exists());
    let inside = |args: &[&str]| {
        let mut chroot = Command::new("chroot");
        chroot.arg("--userspec=65532:65532").arg(&root).arg("/usr/local/bin/elasticdl").args(args);
        said(chroot.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")).ok()
    };
    assert_eq!(inside(&["--version"]), world.run(&["--version"]).ok());
    let settings: Value =
        serde_json::from_str(&inside(&["config", "show", "/model_zoo/job.yaml", "--json"])).unwrap();
    assert_eq!(settings["model.zoo"]["value"], "deepfm");
}

#[test]
fn a_model_zoo_is_made_once_and_trains_as_it_is() {
    let world = World::new();
    let said = world.run(&["zoo", "init"]);
    assert_eq!(said.stderr.matches("wrote model_zoo/").count(), 4, "{}", said.stderr);
    let settings = world.run(&["config", "show", "model_zoo/job.yaml", "--json"]).ok();
    assert!(settings.contains(r#""deepfm""#));
    world.write("model_zoo/job.yaml", "mine");
    let again = world.run(&["zoo", "init", "model_zoo", "--base-image", "reg.io/base:v2"]);
    assert_eq!(again.stderr.matches("left alone model_zoo/").count(), 4, "{}", again.stderr);
    assert_eq!(fs::read_to_string(world.path("model_zoo/job.yaml")).unwrap(), "mine");
    world.run(&["zoo", "init", "other", "--base-image", "reg.io/base:v2"]).ok();
    let dockerfile = fs::read_to_string(world.path("other/Dockerfile")).unwrap();
    assert!(dockerfile.contains("\nFROM reg.io/base:v2\n"), "{dockerfile}");
    tiny_program(&world);
    let built = world.run(&["zoo", "build", "other", "--image", "other:v1", "--binary", "tiny"]);
    assert!(built.stderr.contains("reg.io/base:v2, which the Dockerfile names"), "{}", built.stderr);
}

#[test]
fn an_image_arrives_byte_for_byte_and_is_not_sent_twice() {
    let world = world_with_image();
    let registry = Registry::start();
    let first = push(&world, &registry, "team/zoo:v1").last_json();
    assert_eq!((&first["sent"], &first["there"]), (&3.into(), &0.into()));
    assert_eq!(first["name"], format!("{}/team/zoo:v1", registry.address));
    let members = members(&world.path("zoo-v1.tar"));
    let parts: BTreeMap<String, Vec<u8>> = {
        let state = registry.state();
        let sent = &state.manifests["team/zoo:v1"];
        assert_eq!(first["digest"], digest_of(sent));
        assert_eq!(*sent, members[&format!("blobs/{}", digest_of(sent).replace(':', "/"))]);
        state.blobs.clone()
    };
    let manifest = manifest(&members);
    let named: Vec<&Value> =
        [&manifest["config"]].into_iter().chain(manifest["layers"].as_array().unwrap()).collect();
    assert_eq!(parts.len(), named.len());
    for part in named {
        assert!(parts[part["digest"].as_str().unwrap()] == blob(&members, part));
    }
    registry.state().calls.clear();
    let second = push(&world, &registry, "zoo-v1.tar").last_json();
    assert_eq!((&second["sent"], &second["there"], &second["bytes"]), (&0.into(), &3.into(), &0.into()));
    assert_eq!(second["digest"], first["digest"]);
    let calls = registry.state().calls.clone();
    assert_eq!(calls.iter().filter(|call| call.starts_with("HEAD ")).count(), 3);
    assert_eq!(calls.iter().filter(|call| !call.starts_with("HEAD ")).count(), 1, "{calls:?}");
}

#[test]
fn what_fails_for_a_moment_is_tried_again() {
    let world = world_with_image();
    let registry = Registry::start();
    registry.state().outages = 2;
    registry.state().cuts = 2;
    let said = push(&world, &registry, "zoo-v1.tar");
    assert_eq!(said.stderr.matches("is tried again in").count(), 4, "{}", said.stderr);
    assert_eq!(said.last_json()["sent"], 3);
    assert_eq!(registry.state().blobs.len(), 3);
    registry.state().outages = 100;
    let failed = push(&world, &registry, "zoo-v1.tar").failed(1);
    assert!(failed.contains("failed 5 times"), "{failed}");
    assert!(failed.contains("503 Service Unavailable"), "{failed}");
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let closed = world.run(&["zoo", "push", "zoo-v1.tar", "--registry", &nobody, "--insecure"]).failed(1);
    assert!(closed.contains("failed 5 times"), "{closed}");
    assert!(closed.ends_with("hint: is the address right, and does the registry run?\n"), "{closed}");
}

#[test]
fn a_registry_is_told_who_calls_by_password_or_by_token() {
    let world = world_with_image();
    let registry = Registry::start();
    // "me:secret"
    let (auth, basic) = ("bWU6c2VjcmV0", "Basic bWU6c2VjcmV0".to_string());
    registry.state().guard = Some((basic.clone(), r#"Basic realm="here""#.into()));
    let nobody = push(&world, &registry, "zoo-v1.tar").failed(1);
    insta::assert_snapshot!("push_unauthorized", nobody.replace(&registry.address, "[REGISTRY]"));
    log_in(&world, &registry, auth);
    assert_eq!(push(&world, &registry, "zoo-v1.tar").last_json()["sent"], 3);

    let realm = format!(r#"Bearer realm="http://{}/token",service="reg""#, registry.address);
    registry.state().guard = Some(("Bearer granted".into(), realm));
    registry.state().token = Some((basic, "granted".into()));
    registry.state().calls.clear();
    assert_eq!(push(&world, &registry, "zoo-v1.tar").last_json()["there"], 3);
    let calls = registry.state().calls.clone();
    let asked: Vec<_> = calls.iter().filter(|call| call.starts_with("GET /token")).collect();
    assert_eq!(asked.len(), 1, "{calls:?}");
    assert!(asked[0].contains("service=reg"), "{asked:?}");
    assert!(asked[0].contains("team") && asked[0].contains("push"), "{asked:?}");

    log_in(&world, &registry, "eW91OndoYXQ=");
    let refused = push(&world, &registry, "zoo-v1.tar").failed(1);
    insta::assert_snapshot!("push_forbidden", refused.replace(&registry.address, "[REGISTRY]"));
}

#[test]
fn images_that_cannot_be_made_or_sent_are_told_with_the_way_out() {
    let world = world_with_image();
    let told = |name: &str, args: &[&str]| {
        let text = world.neutral(&world.run(args).failed(1));
        insta::assert_snapshot!(name, text);
    };
    told("image_name_wrong", &["image", "--out", "x.tar", "--name", "Team/Zoo"]);
    told("image_add_missing", &["image", "--out", "x.tar", "--add", "nope:/x"]);
    told("image_user_wrong", &["image", "--out", "x.tar", "--user", "root"]);
    told("image_binary_wrong", &["image", "--out", "x.tar", "--binary", "zoo/job.yaml"]);
    told("image_base_wrong", &["image", "--out", "x.tar", "--binary", "tiny", "--base", "zoo/job.yaml"]);
    told("zoo_missing", &["zoo", "build", "nope", "--image", "x:v1"]);
    told("zoo_out_inside", &["zoo", "build", "zoo", "--image", "x:v1", "--out", "zoo/new/x.tar"]);
    told("push_missing", &["zoo", "push", "team/other:v1"]);
    fs::rename(world.path("zoo-v1.tar"), world.path("zoo-v2.tar")).unwrap();
    told("push_other_image", &["zoo", "push", "team/zoo:v2"]);
    assert!(!world.path("x.tar").exists());
    let mut bytes = fs::read(world.path("zoo-v2.tar")).unwrap();
    let at = bytes.windows(2).position(|pair| pair == [0x1f, 0x8b]).unwrap();
    bytes[at + 20] ^= 1;
    fs::write(world.path("zoo-v2.tar"), bytes).unwrap();
    let registry = Registry::start();
    let damaged = push(&world, &registry, "zoo-v2.tar").failed(1);
    assert!(damaged.contains("is damaged: it is not what its digest says"), "{damaged}");
    assert_eq!(registry.state().calls, [""; 0], "nothing is sent of a damaged image");
}
