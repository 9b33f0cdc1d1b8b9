//! From a committed checkpoint to a model that needs no servers.
//!
//! Rows go from the checkpoint's files to the model's file without being in memory together. A file is there under
//! its name only when it is whole; the old manifest goes first and the new one comes last, so that a model is whole
//! or not there.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context;
use elasticdl_master::checkpoint::Manifest as Committed;
use elasticdl_ps::checkpoint::{Piece, Reader};
use elasticdl_spec::JobSpec;
use elasticdl_storage::{self as storage, Sink};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::args;
use crate::check;
use crate::fault::{Exit, Fault};
use crate::home::{Home, JobDir};
use crate::model::{FORMAT, FileSum, MANIFEST, Manifest, WEIGHTS, Writer};
use crate::{gang, print, store};

/// What was exported.
#[derive(Debug)]
pub struct Exported {
    out: PathBuf,
    manifest: Manifest,
}

impl Exported {
    /// For events and programs.
    pub fn as_json(&self) -> Value {
        let bytes: u64 = self.manifest.files.values().map(|sum| sum.bytes).sum();
        let rows: u64 = self.manifest.rows.values().sum();
        json!({ "path": self.out, "bytes": bytes, "rows": rows, "checkpoint": self.manifest.checkpoint })
    }
}

/// `export`.
pub fn command(args: &args::Export) -> anyhow::Result<Exit> {
    let dir = Home::find()?.existing(&args.job)?;
    let record = dir.record()?;
    gang::refuse(&record.job, "export")?;
    let (_, checkpoint) = store::newest(&dir.checkpoints(&record), &args.job)?;
    if let Some(problem) = check::foreign("--out", &args.out) {
        return Err(Fault::user(problem.what).hint(problem.hint.unwrap_or_default()).into());
    }
    let exported = export(&dir, &record.job, &checkpoint, &args.out)?;
    let facts = exported.as_json();
    let (rows, bytes) = (facts["rows"].as_u64().unwrap_or(0), facts["bytes"].as_u64().unwrap_or(0));
    let (shown, rows, bytes) = (args.out.display(), print::count(rows), print::bytes(bytes));
    let trained = print::count(exported.manifest.records);
    print::note(&format!(
        "{shown}: checkpoint {}, {trained} records, {rows} rows, {bytes}",
        exported.manifest.checkpoint
    ));
    Ok(Exit::Done)
}

/// Exports the checkpoint in a directory.
pub fn export(dir: &JobDir, job: &JobSpec, checkpoint: &Path, out: &Path) -> anyhow::Result<Exported> {
    let committed = committed(checkpoint)?;
    let all = checkpoint.parent().with_context(|| format!("{} is no checkpoint", checkpoint.display()))?;
    let reader = Reader::open(store::chains(all, &committed))?;
    reader.verify()?;
    let failed = || format!("writing the model to {}", out.display());
    storage::make_dir(out).with_context(|| format!("making {}", out.display()))?;
    let (weights, sum) = write_weights(&reader, &out.join(WEIGHTS)).with_context(failed)?;
    let judged = judged(dir, &committed);
    let tables = reader.shape().tables.iter().enumerate();
    let manifest = Manifest {
        format: FORMAT,
        job: job.name.clone(),
        model: job.model.clone(),
        layout: job.data.layout.clone(),
        data_format: job.data.format,
        shape: reader.shape().clone(),
        checkpoint: committed.id,
        records: committed.done.records,
        logloss: judged.map(|(logloss, _)| logloss),
        auc: judged.and_then(|(_, auc)| auc),
        rows: tables.map(|(i, table)| (table.name.clone(), reader.rows(i))).collect(),
        files: BTreeMap::from([(WEIGHTS.to_string(), sum)]),
    };
    put_in_place(out, weights, &manifest).with_context(failed)?;
    Ok(Exported { out: out.into(), manifest })
}

fn committed(checkpoint: &Path) -> anyhow::Result<Committed> {
    let path = checkpoint.join("manifest.json");
    let text = storage::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let damaged = || Fault::user(format!("{} is damaged", path.display()));
    serde_json::from_slice(&text).map_err(|e| damaged().because(e).into())
}

/// Writes ids and rows of each table, then the tensors, in passes over the checkpoint.
fn write_weights(reader: &Reader, path: &Path) -> anyhow::Result<(Sink, FileSum)> {
    let shape = reader.shape();
    let mut tensors = Vec::new();
    for (i, table) in shape.tables.iter().enumerate() {
        let rows = reader.rows(i) as usize;
        tensors.push((format!("{}.ids", table.name), Dtype::U64, vec![rows]));
        tensors.push((format!("{}.rows", table.name), Dtype::F32, vec![rows, table.width()]));
    }
    tensors.extend(shape.tensors.iter().map(|t| (t.name.clone(), Dtype::F32, t.shape.clone())));
    let mut writer = Writer::create(path, tensors)?;
    for wanted in &shape.tables {
        reader.visit(|piece| match piece {
            Piece::Rows { table, ids, .. } if table.name == wanted.name => {
                put(&mut writer, bytemuck::cast_slice(ids))
            }
            _ => Ok(()),
        })?;
        reader.visit(|piece| match piece {
            Piece::Rows { table, weights, .. } if table.name == wanted.name => {
                put(&mut writer, bytemuck::cast_slice(weights))
            }
            _ => Ok(()),
        })?;
    }
    reader.visit(|piece| match piece {
        Piece::Tensor { values, .. } => put(&mut writer, bytemuck::cast_slice(values)),
        Piece::Rows { .. } => Ok(()),
    })?;
    Ok(writer.complete()?)
}

fn put(writer: &mut Writer, bytes: &[u8]) -> anyhow::Result<()> {
    Ok(writer.put(bytes)?)
}

/// The final evaluation's figures, where it judged just what this checkpoint holds.
fn judged(dir: &JobDir, committed: &Committed) -> Option<(f64, Option<f64>)> {
    let evaluated = dir.last_event("evaluated")?;
    let field = |name: &str| evaluated.fields.get(name);
    let same = field("last")?.as_bool()? && field("trained")?.as_u64()? == committed.done.records;
    let logloss = field("logloss")?.as_f64().filter(|_| same)?;
    Some((logloss, field("auc").and_then(Value::as_f64)))
}

/// Gives the files their names. Without a manifest there is no model, so it leaves first and comes last.
fn put_in_place(out: &Path, weights: Sink, manifest: &Manifest) -> io::Result<()> {
    storage::remove(out.join(MANIFEST))?;
    weights.finish()?;
    let mut text = serde_json::to_vec_pretty(manifest)?;
    text.push(b'\n');
    storage::replace(out.join(MANIFEST), &text)
}
