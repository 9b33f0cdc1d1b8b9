//! `zoo push`: an image archive goes to a registry.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::registry::{Body, Registry};
use super::{credentials, run_docker};
use crate::args::ZooPush;
use crate::fault::{Exit, Fault};
use crate::image::archive::{Descriptor, MEDIA_MANIFEST};
use crate::image::reference::Reference;
use crate::image::stored::Stored;
use crate::print;

/// `zoo push`.
pub fn push(args: &ZooPush) -> anyhow::Result<Exit> {
    if args.docker {
        let mut docker = Command::new("docker");
        docker.arg("push").arg(&args.image);
        return run_docker(docker, "without --docker an archive is sent, and no Docker is needed");
    }
    let (path, named) = archive(&args.image)?;
    let stored = Stored::open(&path)?;
    let (image, manifest) = stored.image(None)?;
    let name = name(&stored, &image, &path)?;
    if let Some(named) = named.filter(|named| named.qualified() != name.qualified()) {
        let what = format!("{} holds {name}, not {named}", path.display());
        return Err(Fault::user(what).hint(format!("push {name}, or the file itself")).into());
    }
    let target = args.registry.as_deref().map_or(name.clone(), |registry| name.at(registry));
    let parts: BTreeMap<_, _> =
        [&manifest.config].into_iter().chain(&manifest.layers).map(|part| (&part.digest, part)).collect();
    for part in parts.values() {
        stored.verify(part)?;
    }
    let document = stored.document(&image)?;
    let scheme = if args.insecure { "http" } else { "https" };
    let mut registry = Registry::new(scheme, &target, credentials::find)?;
    let (mut sent, mut bytes) = (0, 0);
    for part in parts.values() {
        let shown = format!("{}… ({})", &part.digest.hex()[..12], print::bytes(part.size));
        if registry.has(&part.digest)? {
            print::note(&format!("{shown} is there already"));
            continue;
        }
        registry.upload(&part.digest, &Body::Part(&stored, part))?;
        print::note(&format!("{shown} sent"));
        (sent, bytes) = (sent + 1, bytes + part.size);
    }
    let media_type = manifest.media_type.as_deref().unwrap_or(MEDIA_MANIFEST);
    registry.tag(target.tag(), media_type, &document, &image.digest)?;
    print::note(&format!("pushed {target}, digest {}", image.digest));
    if args.json {
        let there = parts.len() - sent;
        let digest = image.digest.to_string();
        let facts = json!({ "name": target.to_string(), "digest": digest, "sent": sent, "there": there, "bytes": bytes });
        print::line(&facts.to_string())?;
    }
    Ok(Exit::Done)
}

/// The archive that is meant, and the name where it was given by that.
fn archive(text: &str) -> anyhow::Result<(PathBuf, Option<Reference>)> {
    let path = Path::new(text);
    if path.is_file() {
        return Ok((path.into(), None));
    }
    let missing =
        |what: String| Fault::user(what).hint("`elasticdl image` and `elasticdl zoo build` make archives");
    let Ok(name) = text.parse::<Reference>() else {
        return Err(missing(format!("there is no file {text}")).into());
    };
    let file = PathBuf::from(name.file_name());
    if !file.is_file() {
        return Err(
            missing(format!("there is no file {text}, and no {} with that image", file.display())).into()
        );
    }
    Ok((file, Some(name)))
}

fn name(stored: &Stored, image: &Descriptor, path: &Path) -> anyhow::Result<Reference> {
    let name = stored.name(image).and_then(|name| name.parse().ok());
    name.ok_or_else(|| {
        Fault::user(format!("{} does not say what its image is called", path.display()))
            .hint("push archives that `elasticdl image` or `elasticdl zoo build` made")
            .into()
    })
}
