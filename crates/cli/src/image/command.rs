//! `elasticdl image`.

use std::path::{Path, PathBuf};

use anyhow::Context;

use super::layer::Contents;
use super::{Recipe, furniture};
use crate::args;
use crate::fault::{Exit, Fault};
use crate::print;

/// `image`.
pub fn command(args: &args::Image) -> anyhow::Result<Exit> {
    let mut files = Contents::default();
    for add in &args.add {
        let source = &add.source;
        if !source.exists() {
            let what = format!("--add {}: there is no such file or directory", source.display());
            return Err(Fault::user(what).hint("write it as SRC:DEST, for example zoo:/model_zoo").into());
        }
        files.add(source, &add.place(), &|_| false)?;
    }
    let recipe = Recipe {
        name: args.name.clone(),
        binary: binary(args.binary.as_deref())?,
        base: args.base.clone(),
        user: args.user.clone(),
        files,
    };
    warn_of_certificates();
    recipe.write(&args.out)?.tell(args.json)?;
    Ok(Exit::Done)
}

/// The program that was named, or this one.
pub fn binary(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    match named {
        Some(path) => Ok(path.into()),
        None => std::env::current_exe().context("finding this program"),
    }
}

/// Says so where an image cannot trust anybody.
pub fn warn_of_certificates() {
    if furniture::certificates().is_none() {
        print::note("warning: there is no file of CA certificates here, so the image has none");
    }
}
