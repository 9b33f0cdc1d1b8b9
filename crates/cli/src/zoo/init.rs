//! `zoo init`: a directory to start from.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

use anyhow::Context;

use crate::args::ZooInit;
use crate::fault::Exit;
use crate::print;

/// Names and texts of the files; `{base}` stands for the base image.
const FILES: [(&str, &str); 4] = [
    ("job.yaml", include_str!("template/job.yaml")),
    ("README.md", include_str!("template/README.md")),
    ("Dockerfile", include_str!("template/Dockerfile")),
    (".dockerignore", include_str!("template/dockerignore")),
];

/// `zoo init`.
pub fn init(args: &ZooInit) -> anyhow::Result<Exit> {
    let dir = &args.dir;
    fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    for (name, text) in FILES {
        let path = dir.join(name);
        let text = text.replace("{base}", &args.base_image.to_string());
        let wrote = write_new(&path, &text).with_context(|| format!("writing {}", path.display()))?;
        print::note(&format!("{} {}", if wrote { "wrote" } else { "left alone" }, path.display()));
    }
    let job = dir.join("job.yaml");
    print::note(&format!("try it: elasticdl train {}", job.display()));
    Ok(Exit::Done)
}

/// Writes a file unless there is one; tells which.
fn write_new(path: &Path, text: &str) -> io::Result<bool> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Ok(mut file) => file.write_all(text.as_bytes()).map(|()| true),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(e),
    }
}
