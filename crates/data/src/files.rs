//! Patterns become data files, and what cannot be data is found before anything starts.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use elasticdl_spec::job::Format;
use elasticdl_storage as storage;

use crate::error::{Error, Result};
use crate::near;

/// A file that holds records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// Where it is, as the pattern found it.
    pub path: String,
    /// What it holds.
    pub format: Format,
    /// How a text file is packed.
    pub compression: Compression,
    /// Its size.
    pub bytes: u64,
    /// Size and modification time (of an object, its ETag) in one number: it changes when the file does.
    pub fingerprint: u64,
}

/// How a text file is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// It is not: it can be read from the middle.
    Plain,
    /// gzip, known by `.gz`.
    Gzip,
    /// Zstandard, known by `.zst`.
    Zstd,
}

/// The files that `patterns` (paths, URLs, or globs of either) name: sorted by path, each once.
///
/// `format` is `data.format`: it counts for all files. Without it names tell: `.parquet`, and `.csv`,
/// `.tsv`, `.txt`, `.data`, `.test` (UCI names its pairs so) for text; `.gz` or `.zst` behind any of
/// those means packed text.
pub fn discover(patterns: &[String], format: Option<Format>) -> Result<Vec<DataFile>> {
    // Two patterns may name one file in two ways; training its records twice would be wrong.
    let mut files = BTreeMap::new();
    for pattern in patterns {
        for path in matches(pattern)? {
            let file = look_at(&path, format)?;
            files.entry(real_path(&path)?).or_insert(file);
        }
    }
    let mut files: Vec<DataFile> = files.into_values().collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// What a file with this name holds and how it is packed.
pub(crate) fn format_of(path: &Path, format: Option<Format>) -> Result<(Format, Compression)> {
    let extension =
        |path: &Path| path.extension().map(|e| e.to_string_lossy().to_lowercase()).unwrap_or_default();
    let last = extension(path);
    let (compression, inner) = match last.as_str() {
        "gz" => (Compression::Gzip, path.file_stem().map(Path::new).map(extension).unwrap_or_default()),
        "zst" => (Compression::Zstd, path.file_stem().map(Path::new).map(extension).unwrap_or_default()),
        _ => (Compression::Plain, last),
    };
    let wrong = |reason| Err(Error::File { path: path.to_path_buf(), reason });
    let format = match (format, inner.as_str()) {
        (Some(format), _) => format,
        (None, "csv" | "tsv" | "txt" | "data" | "test") => Format::Text,
        (None, "parquet") => Format::Parquet,
        (None, _) => {
            return wrong(
                "its name does not tell what it holds (.csv, .tsv, .txt, .data, .test, each also with .gz or .zst, \
                 or .parquet); set data.format",
            );
        }
    };
    match (format, compression) {
        (Format::Parquet, Compression::Gzip | Compression::Zstd) => {
            wrong("a Parquet file is packed inside; unpack it first")
        }
        known => Ok(known),
    }
}

/// The one name of a file that may have several.
pub fn real_path(path: &Path) -> Result<PathBuf> {
    if storage::is_url(path) {
        return Ok(path.into());
    }
    fs::canonicalize(path).map_err(Error::io("find", path))
}

/// The paths that a pattern names; at least one.
fn matches(pattern: &str) -> Result<Vec<PathBuf>> {
    if storage::is_url(pattern) {
        return objects(pattern);
    }
    // A name may hold brackets. What exists as it stands is meant as it stands.
    if Path::new(pattern).symlink_metadata().is_ok() {
        return Ok(vec![PathBuf::from(pattern)]);
    }
    // Files that are being made have names with a leading dot: `*` must not find them.
    let options = glob::MatchOptions {
        case_sensitive: true,
        require_literal_separator: true,
        require_literal_leading_dot: true,
    };
    let found = glob::glob_with(pattern, options)
        .map_err(|source| Error::Pattern { pattern: pattern.to_string(), source })?;
    let mut paths = Vec::new();
    for entry in found {
        paths.push(entry.map_err(|error| {
            let path = error.path().to_path_buf();
            Error::Io { attempt: "list", path, source: error.into() }
        })?);
    }
    if paths.is_empty() {
        return Err(Error::NoMatch { pattern: pattern.to_string(), near: near_misses(pattern) });
    }
    Ok(paths)
}

/// The objects that a pattern names; at least one.
fn objects(pattern: &str) -> Result<Vec<PathBuf>> {
    let failed = Error::io("list", pattern);
    if storage::exists(pattern).map_err(Error::io("look at", pattern))? {
        return Ok(vec![PathBuf::from(pattern)]);
    }
    let found = storage::matching(pattern).map_err(failed)?;
    if found.is_empty() {
        return Err(Error::NoMatch { pattern: pattern.to_string(), near: near_misses(pattern) });
    }
    Ok(found.into_iter().map(PathBuf::from).collect())
}

fn look_at(path: &Path, format: Option<Format>) -> Result<DataFile> {
    let wrong = |reason| Err(Error::File { path: path.to_path_buf(), reason });
    let Some(name) = path.to_str() else {
        return wrong("its name is not UTF-8; rename it");
    };
    if !storage::is_url(path) {
        let metadata = fs::metadata(path).map_err(Error::io("look at", path))?;
        if metadata.is_dir() {
            return wrong("it is a directory; name the files in it, as in DIR/*.csv");
        }
        if !metadata.is_file() {
            return wrong("it is no regular file");
        }
    }
    // Opening it, not only looking, finds out whether it may be read.
    let file = storage::open(path).map_err(Error::io("open", path))?;
    let meta = file.meta().map_err(Error::io("look at", path))?;
    if meta.bytes == 0 {
        return wrong("it is empty");
    }
    let (format, compression) = format_of(path, format)?;
    Ok(DataFile {
        path: name.to_string(),
        format,
        compression,
        bytes: meta.bytes,
        fingerprint: meta.fingerprint,
    })
}

/// What is there instead of what a pattern names: up to three similar names in the deepest
/// directory of it that exists.
fn near_misses(pattern: &str) -> Vec<String> {
    const SHOWN: usize = 3;
    let path = Path::new(pattern);
    let listed = path.ancestors().skip(1).find(|ancestor| is_directory(ancestor));
    let Some(directory) = listed else { return Vec::new() };
    let Some(wanted) = path.strip_prefix(directory).ok().and_then(|rest| rest.iter().next()?.to_str()) else {
        return Vec::new();
    };
    let Ok(names) = storage::list(as_directory(directory)) else { return Vec::new() };
    let near = near::ranked(wanted, names.iter().map(String::as_str));
    near.into_iter().take(SHOWN).map(|name| directory.join(name).display().to_string()).collect()
}

/// Whether there is such a directory. One of objects is there when something is in it.
fn is_directory(path: &Path) -> bool {
    if storage::is_url(path) {
        return storage::list(path).is_ok_and(|names| !names.is_empty());
    }
    as_directory(path).is_dir()
}

/// The directory of a path without one is the current one.
fn as_directory(path: &Path) -> &Path {
    if path.as_os_str().is_empty() { Path::new(".") } else { path }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a temporary directory");
        for (name, content) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().expect("a file is in a directory"))
                .expect("directories can be made");
            fs::write(path, content).expect("a file can be written");
        }
        directory
    }

    fn found(directory: &tempfile::TempDir, patterns: &[&str]) -> Result<Vec<String>> {
        let patterns: Vec<String> =
            patterns.iter().map(|pattern| format!("{}/{pattern}", directory.path().display())).collect();
        let files = discover(&patterns, None)?;
        let name = |file: DataFile| file.path[directory.path().as_os_str().len() + 1..].to_string();
        Ok(files.into_iter().map(name).collect())
    }

    fn error(directory: &tempfile::TempDir, pattern: &str) -> String {
        let error = found(directory, &[pattern]).expect_err("this pattern is wrong");
        assert_eq!(error.kind(), elasticdl_spec::Kind::User);
        error.to_string().replace(&directory.path().display().to_string(), "DIR")
    }

    #[test]
    fn files_are_sorted_and_named_once_however_often_they_match() {
        let directory = directory(&[("b.csv", "x"), ("a.csv", "x"), ("sub/c.csv", "x"), (".d.csv", "x")]);
        assert_eq!(
            found(&directory, &["sub/../b.csv", "*.csv", "**/c.csv", "a.csv"]).expect("all match"),
            ["a.csv", "sub/../b.csv", "sub/c.csv"]
        );
    }

    #[test]
    fn names_tell_format_and_packing() {
        let known = |name: &str| format_of(Path::new(name), None);
        assert_eq!(known("x.CSV").expect("text"), (Format::Text, Compression::Plain));
        assert_eq!(known("x.data.gz").expect("text"), (Format::Text, Compression::Gzip));
        assert_eq!(known("x.tsv.zst").expect("text"), (Format::Text, Compression::Zstd));
        assert_eq!(known("x.parquet").expect("Parquet"), (Format::Parquet, Compression::Plain));
        assert!(known("x.parquet.gz").is_err());
        let message = known("part-0001").expect_err("no extension").to_string();
        assert!(message.starts_with("cannot use part-0001 as data: its name does not tell"), "{message}");
        let told = format_of(Path::new("part-0001.gz"), Some(Format::Text)).expect("told");
        assert_eq!(told, (Format::Text, Compression::Gzip));
    }

    #[test]
    fn a_pattern_without_files_names_what_is_there() {
        let directory =
            directory(&[("train.tsv", "x"), ("train2.tsv", "x"), ("readme", "x"), ("data/a.csv", "x")]);
        assert_eq!(
            error(&directory, "trian.tsv"),
            "no data file matches DIR/trian.tsv; there is DIR/train.tsv, DIR/train2.tsv"
        );
        assert_eq!(error(&directory, "dta/*.csv"), "no data file matches DIR/dta/*.csv; there is DIR/data");
        assert_eq!(error(&directory, "zzz*"), "no data file matches DIR/zzz*");
    }

    #[test]
    fn what_cannot_be_data_is_refused_by_name() {
        let directory = directory(&[("empty.csv", ""), ("sub.csv/x.csv", "x"), ("notes.md", "x")]);
        assert_eq!(error(&directory, "empty.csv"), "cannot use DIR/empty.csv as data: it is empty");
        assert!(error(&directory, "sub.csv").contains("it is a directory; name the files in it"));
        assert!(error(&directory, "*.md").contains("set data.format"));
        assert!(error(&directory, "a[b").contains("is no pattern for files"));
    }

    #[test]
    fn the_fingerprint_changes_with_the_file() {
        let directory = directory(&[("a.csv", "x")]);
        let pattern = [format!("{}/a.csv", directory.path().display())];
        let before = discover(&pattern, None).expect("it is there");
        assert_eq!(before, discover(&pattern, None).expect("it is there"));
        fs::write(&pattern[0], "xy").expect("a file can be written");
        assert_ne!(before, discover(&pattern, None).expect("it is there"));
    }
}
