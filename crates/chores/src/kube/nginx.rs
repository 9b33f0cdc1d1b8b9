//! An image with Debian's nginx: an online service for experiments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::image::Image;
use super::places::{Places, make_directory, write_file};
use super::process::{output, succeed};

/// Its name.
pub const NGINX: &str = "testcluster.local/nginx:1";

/// One process, which answers whoever asks. Pods have no users and no directories of its own.
const CONFIGURATION: &str = "\
daemon off;
master_process off;
pid /tmp/nginx.pid;
error_log stderr;
events { worker_connections 64; }
http {
  access_log off;
  client_body_temp_path /tmp/body;
  proxy_temp_path /tmp/proxy;
  fastcgi_temp_path /tmp/fastcgi;
  uwsgi_temp_path /tmp/uwsgi;
  scgi_temp_path /tmp/scgi;
  server { listen 8080; location / { return 200 \"here\\n\"; } }
}
";

/// Writes the archive, with the package as Debian has it today. Nothing is installed on this machine.
pub fn archive(places: &Places) -> Result<PathBuf> {
    let directory = places.images().join("nginx");
    make_directory(&directory)?;
    let program = directory.join("usr/sbin/nginx");
    if !program.exists() {
        fetch(&directory)?;
    }
    let configuration = directory.join("nginx.conf");
    write_file(&configuration, CONFIGURATION)?;
    let mut programs =
        vec![("usr/sbin/nginx".to_owned(), program.clone()), ("etc/nginx.conf".to_owned(), configuration)];
    for library in libraries(&program)? {
        programs.push((library.trim_start_matches('/').to_owned(), library.into()));
    }
    let image = Image {
        name: NGINX.into(),
        programs,
        directories: vec!["tmp".into()],
        entrypoint: ["/usr/sbin/nginx", "-c", "/etc/nginx.conf"].map(String::from).into(),
        ..Image::default()
    };
    let archive = places.images().join("nginx.tar");
    image.write(&archive)?;
    Ok(archive)
}

fn fetch(directory: &Path) -> Result<()> {
    let mut download = Command::new("apt-get");
    download.args(["download", "--quiet=2", "nginx"]).current_dir(directory).stdout(Stdio::null());
    succeed(&mut download).context("fetch Debian's nginx")?;
    for entry in fs::read_dir(directory).context("look for the package")? {
        let package = entry.context("look for the package")?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            succeed(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(directory))?;
        }
    }
    Ok(())
}

/// The loader and the shared libraries of a program, as this machine has them.
fn libraries(program: &Path) -> Result<Vec<String>> {
    Ok(listed(&output(Command::new("ldd").arg(program).stdout(Stdio::piped()))?))
}

/// The paths in what `ldd` writes.
fn listed(text: &str) -> Vec<String> {
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(str::to_owned);
    text.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_is_a_library_too_and_what_has_no_file_is_not() {
        let text = "\tlinux-vdso.so.1 (0x00007f6c3af18000)\n\tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f6c3af1a000)\n";
        assert_eq!(listed(text), ["/lib/x86_64-linux-gnu/libz.so.1", "/lib64/ld-linux-x86-64.so.2"]);
    }
}
