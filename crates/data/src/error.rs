//! What can go wrong with a file ([`Error`]), and what can be wrong with a record ([`BadRecord`]).

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use elasticdl_spec::Kind;
use serde::{Deserialize, Serialize};

/// The result of reading or making data.
pub type Result<T> = std::result::Result<T, Error>;

/// Why data could not be read or made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {attempt} {}", path.display())]
    Io {
        /// What was tried: a verb.
        attempt: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A pattern names no file.
    #[error("no data file matches {pattern}{}", hint_near(near))]
    NoMatch {
        /// The pattern.
        pattern: String,
        /// Files that exist and have similar names, the nearest first.
        near: Vec<String>,
    },
    /// A pattern cannot be understood.
    #[error("{pattern:?} is no pattern for files")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why not.
        source: glob::PatternError,
    },
    /// A file cannot be used as data, and its records were not even looked at.
    #[error("cannot use {} as data: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        reason: &'static str,
    },
    /// A file is not what it was when its shards were cut: its records may be others now.
    #[error("{path} changed since it was cut into shards; restore it, or start a new job")]
    Changed {
        /// The file.
        path: String,
    },
    /// A column that the layout uses is not in the file.
    #[error("{path} has no column {column:?}{}; its columns are {}", hint_nearest(nearest), list(columns))]
    MissingColumn {
        /// The file.
        path: String,
        /// The column that was looked for.
        column: String,
        /// The most similar column there is.
        nearest: Option<String>,
        /// The columns there are.
        columns: Vec<String>,
    },
    /// A column's type has no meaning as a field.
    #[error(
        "column {column:?} of {path} is of type {found}; only integers, floats, booleans and text can be read"
    )]
    ColumnType {
        /// The file.
        path: String,
        /// The column.
        column: String,
        /// Its type.
        found: String,
    },
    /// A record has no end in sight.
    #[error("the record at line {line} of {path} is longer than {bytes_max} bytes; {hint}")]
    LongRecord {
        /// The file.
        path: String,
        /// Its (first) line, counted from 1.
        line: u64,
        /// How long a record may be.
        bytes_max: usize,
        /// What may be the matter.
        hint: &'static str,
    },
    /// A Parquet file is damaged or beyond what can be read.
    #[error("cannot read {path}{}", row_group.map(|n| format!(", row group {n}")).unwrap_or_default())]
    Parquet {
        /// The file.
        path: String,
        /// The row group, counted from 0; `None` for the footer.
        row_group: Option<usize>,
        /// Why not.
        source: parquet::errors::ParquetError,
    },
    /// What was asked for makes no sense.
    #[error("{0}")]
    Options(String),
}

impl Error {
    /// What the failure means for whoever sees it.
    pub fn kind(&self) -> Kind {
        match self {
            Error::Io { source, .. } => kind_of(source),
            Error::Parquet { source: parquet::errors::ParquetError::External(source), .. } => {
                source.downcast_ref::<io::Error>().map_or(Kind::User, kind_of)
            }
            _ => Kind::User,
        }
    }

    /// Wraps a refusal by the operating system: `.map_err(Error::io("open", path))`.
    pub(crate) fn io(attempt: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { attempt, path: path.as_ref().to_path_buf(), source }
    }
}

/// These are about the file and stay; whatever else a disk, a mount or a network reports may pass.
fn kind_of(error: &io::Error) -> Kind {
    use io::ErrorKind as Io;
    match error.kind() {
        Io::NotFound | Io::PermissionDenied | Io::IsADirectory | Io::NotADirectory => Kind::User,
        Io::StorageFull | Io::ReadOnlyFilesystem | Io::QuotaExceeded | Io::FileTooLarge => Kind::User,
        Io::InvalidData | Io::InvalidInput | Io::UnexpectedEof | Io::AlreadyExists => Kind::User,
        _ => Kind::Retry,
    }
}

fn hint_near(near: &[String]) -> String {
    if near.is_empty() { String::new() } else { format!("; there is {}", near.join(", ")) }
}

fn hint_nearest(nearest: &Option<String>) -> String {
    nearest.as_ref().map(|name| format!(" (did you mean {name:?}?)")).unwrap_or_default()
}

/// Names for a message: the first ones, and how many more there are.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 50;
    let more = names.len().saturating_sub(SHOWN);
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// A record that cannot be used, and why: set aside, never guessed at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BadRecord {
    /// The file.
    pub path: String,
    /// Where in it.
    pub place: Place,
    /// The offending column; `None` where the whole record is wrong.
    pub column: Option<Column>,
    /// What is wrong with it.
    pub reason: String,
}

/// Where a record stands in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Place {
    /// Its (first) line in a text file, counted from 1.
    Line(u64),
    /// Its row in a Parquet file, counted from 1.
    Row(u64),
}

/// A column of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Column {
    /// Its place in the file, counted from 1.
    pub number: usize,
    /// Its name.
    pub name: String,
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Line(line) => write!(f, "{}, line {line}", self.path)?,
            Place::Row(row) => write!(f, "{}, row {row}", self.path)?,
        }
        if let Some(Column { number, name }) = &self.column {
            write!(f, ", column {number} ({name})")?;
        }
        write!(f, ": {}", self.reason)
    }
}
