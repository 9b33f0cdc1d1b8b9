//! Model zoos: directories of job files that become images, as `elasticdl zoo init`, `build` and `push`.
//!
//! [`init`] writes a directory to start from, [`build`] makes the image, [`push`] sends one to a registry
//! with the help of [`registry`] and [`credentials`].

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::args::{OWN_IMAGE, ZooBuild};
use crate::fault::{Exit, Fault};
use crate::image::Recipe;
use crate::image::command::{binary, warn_of_certificates};
use crate::image::layer::Contents;
use crate::print;

mod credentials;
pub mod init;
pub mod push;
mod registry;

/// Where a model zoo is in an image.
const PLACE: &str = "/model_zoo";
/// What never goes into an image, wherever it is.
const LEFT_OUT: [&str; 2] = [".git", "__pycache__"];
/// What is for Docker alone.
const FOR_DOCKER: [&str; 2] = ["Dockerfile", ".dockerignore"];

/// `zoo build`.
pub fn build(args: &ZooBuild) -> anyhow::Result<Exit> {
    let dir = &args.dir;
    if !dir.is_dir() {
        let hint = format!("`elasticdl zoo init {}` makes one", dir.display());
        return Err(Fault::user(format!("there is no model zoo {}", dir.display())).hint(hint).into());
    }
    if args.docker {
        return build_with_docker(args);
    }
    let out = args.out.clone().unwrap_or_else(|| args.image.file_name().into());
    if is_inside(&out, dir)? {
        let what = format!("the image {} would lie inside the model zoo", out.display());
        return Err(Fault::user(what)
            .hint("name a file elsewhere with --out: the next image would hold it")
            .into());
    }
    let mut files = Contents::default();
    files.add(dir, Path::new(PLACE), &|path| is_left_out(path, dir))?;
    tell_base_image(args);
    let recipe = Recipe {
        name: args.image.clone(),
        binary: binary(args.binary.as_deref())?,
        base: args.base.clone(),
        user: args.user.clone(),
        files,
    };
    warn_of_certificates();
    recipe.write(&out)?.tell(args.json)?;
    Ok(Exit::Done)
}

fn is_left_out(path: &Path, dir: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    LEFT_OUT.contains(&name) || (path.parent() == Some(dir) && FOR_DOCKER.contains(&name))
}

/// Whether a file that need not exist yet is somewhere below a directory.
fn is_inside(file: &Path, dir: &Path) -> anyhow::Result<bool> {
    let dir = dir.canonicalize().with_context(|| format!("reading {}", dir.display()))?;
    let file = std::path::absolute(file)?;
    // Above what is still to be made there is something that can be asked where it really is.
    let there: Option<PathBuf> = file.ancestors().skip(1).find_map(|parent| parent.canonicalize().ok());
    Ok(there.is_some_and(|there| there.starts_with(dir)))
}

/// A base image that the Dockerfile names counts only with Docker; who chose one should know.
fn tell_base_image(args: &ZooBuild) {
    let text = fs::read_to_string(args.dir.join("Dockerfile")).unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("FROM ")).map(str::trim);
    if let Some(named) = named.filter(|named| *named != OWN_IMAGE && args.base.is_none()) {
        print::note(&format!(
            "built upon this program alone: {named}, which the Dockerfile names, counts with --docker \
             (or save it as an archive and give that as --base)"
        ));
    }
}

fn build_with_docker(args: &ZooBuild) -> anyhow::Result<Exit> {
    let file = args.dir.join("Dockerfile");
    if !file.is_file() {
        let hint = format!("`elasticdl zoo init {}` writes one", args.dir.display());
        return Err(Fault::user(format!("there is no {}", file.display())).hint(hint).into());
    }
    let mut docker = Command::new("docker");
    docker.arg("build").arg("--tag").arg(args.image.to_string()).arg(&args.dir);
    run_docker(docker, "without --docker no Docker is needed")
}

/// Runs Docker in front of the person's eyes.
fn run_docker(mut docker: Command, hint: &str) -> anyhow::Result<Exit> {
    let status = docker.status().map_err(|e| Fault::user("cannot run docker").because(e).hint(hint))?;
    if !status.success() {
        let verb = docker.get_args().next().unwrap_or_default().to_string_lossy().into_owned();
        return Err(Fault::user(format!("docker {verb} failed ({status})")).hint(hint).into());
    }
    Ok(Exit::Done)
}
