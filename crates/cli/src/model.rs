//! An exported model on disk: `model.safetensors` with the weights, `manifest.json` with what they mean.
//!
//! The manifest is written last and names the other file's length and checksum, so that a model is whole
//! or not there. Tables are the tensors `NAME.ids` and `NAME.rows`, in the same order.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use anyhow::Context;
use elasticdl_spec::job::Format;
use elasticdl_spec::mix::mix64;
use elasticdl_spec::{Layout, ModelShape, ModelSpec};
use elasticdl_storage::{self as storage, Sink, Source};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// The version of the manifest that this code writes and reads.
pub const FORMAT: u32 = 1;
/// The file with the weights.
pub const WEIGHTS: &str = "model.safetensors";
/// The file that says what they are.
pub const MANIFEST: &str = "manifest.json";

/// What an exported model says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The job that trained it.
    pub job: String,
    /// Which model, and its size.
    pub model: ModelSpec,
    /// What the columns of its data mean.
    pub layout: Layout,
    /// `data.format` of the job.
    pub data_format: Option<Format>,
    /// Its tables and tensors.
    pub shape: ModelShape,
    /// The checkpoint that it was made from.
    pub checkpoint: u64,
    /// Records that it was trained on.
    pub records: u64,
    /// Log loss on the job's validation data, where this very checkpoint was judged.
    pub logloss: Option<f64>,
    /// AUC on the same data.
    pub auc: Option<f64>,
    /// Rows by table.
    pub rows: BTreeMap<String, u64>,
    /// The other files.
    pub files: BTreeMap<String, FileSum>,
}

/// Length and checksum of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSum {
    /// Its length.
    pub bytes: u64,
    /// CRC-32 of all of it.
    pub crc32: u32,
}

/// Writes a safetensors file from parts that come one after the other, so that a large table is never in
/// memory as a whole.
pub struct Writer {
    out: BufWriter<Sink>,
    crc: crc32fast::Hasher,
    bytes: u64,
}

impl Writer {
    /// Begins a file that will hold these tensors, in this order.
    pub fn create(path: &Path, tensors: Vec<(String, Dtype, Vec<usize>)>) -> anyhow::Result<Writer> {
        let mut offset = 0;
        let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
            let start = offset;
            offset += shape.iter().product::<usize>() * (dtype.bitsize() / 8);
            (name, TensorInfo { dtype, shape, data_offsets: (start, offset) })
        };
        let metadata = Metadata::new(None, tensors.into_iter().map(info).collect())?;
        let mut header = serde_json::to_vec(&metadata)?;
        // The data begins on a multiple of eight, so that readers may map it.
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = storage::create(path).with_context(|| format!("creating {}", path.display()))?;
        let mut writer = Writer { out: BufWriter::new(file), crc: crc32fast::Hasher::new(), bytes: 0 };
        writer.put(&(header.len() as u64).to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    /// Appends bytes of the tensor whose turn it is.
    pub fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.crc.update(bytes);
        self.bytes += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    /// The whole file, which is there once it is finished, and what it holds then.
    pub fn complete(self) -> io::Result<(Sink, FileSum)> {
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok((file, FileSum { bytes: self.bytes, crc32: self.crc.finalize() }))
    }
}

/// A trained model in memory, ready to be used by many threads.
#[derive(Debug)]
pub struct Trained {
    /// What it is.
    pub manifest: Manifest,
    /// Values of the dense tensors, in the order of the shape.
    pub tensors: Vec<Vec<f32>>,
    /// Rows of the tables, in the order of the shape.
    pub tables: Vec<Rows>,
}

/// The rows of a table, found by id.
#[derive(Debug, Default)]
pub struct Rows {
    ids: Vec<u64>,
    /// The weights of all rows, then one row of zeros for the ids that have none.
    weights: Vec<f32>,
    /// Open addressing, at most half full: the position of an id plus one, 0 for an empty slot.
    slots: Vec<u32>,
}

impl Rows {
    /// Rows by id; `weights` holds them in the order of `ids`.
    fn new(ids: Vec<u64>, mut weights: Vec<f32>, width: usize) -> Rows {
        assert_eq!(weights.len(), ids.len() * width, "a row for each id");
        assert!(ids.len() < u32::MAX as usize, "positions fit 32 bits");
        weights.resize(weights.len() + width, 0.0);
        let mut slots = vec![0; (ids.len() * 2 + 1).next_power_of_two()];
        let mask = slots.len() - 1;
        for (position, &id) in ids.iter().enumerate() {
            let mut at = mix64(id) as usize & mask;
            while slots[at] != 0 {
                at = (at + 1) & mask;
            }
            slots[at] = position as u32 + 1;
        }
        Rows { ids, weights, slots }
    }

    /// All weights; positions of [`Rows::position`] are rows of it.
    pub fn weights(&self) -> &[f32] {
        &self.weights
    }

    /// The row of an id; an id that was never trained has a row of zeros, as in the job's evaluations.
    pub fn position(&self, id: u64) -> u32 {
        let mask = self.slots.len() - 1;
        let mut at = mix64(id) as usize & mask;
        loop {
            match self.slots[at] {
                0 => return self.ids.len() as u32,
                slot if self.ids[slot as usize - 1] == id => return slot - 1,
                _ => at = (at + 1) & mask,
            }
        }
    }
}

impl Trained {
    /// Reads an exported model; a damaged one is an error that says what is wrong.
    pub fn open(dir: &Path) -> anyhow::Result<Trained> {
        let manifest = manifest(dir)?;
        let path = dir.join(WEIGHTS);
        let expected = manifest.files.get(WEIGHTS);
        let damaged = |reason: String| {
            Fault::user(format!("{} is damaged: {reason}", path.display())).hint("export the model again")
        };
        let expected = *expected.ok_or_else(|| damaged("the manifest does not name it".into()))?;
        let file = storage::open(&path).with_context(|| format!("opening {}", path.display()))?;
        let bytes = file.meta().with_context(|| format!("looking at {}", path.display()))?.bytes;
        if bytes != expected.bytes {
            return Err(damaged(format!("it has {bytes} bytes, the manifest says {}", expected.bytes)).into());
        }
        let mut reader = Reader { file, crc: crc32fast::Hasher::new() };
        let read = reader.tensors().map_err(|e| damaged(format!("{e:#}")))?;
        if reader.crc.finalize() != expected.crc32 {
            return Err(damaged("its checksum is not the one in the manifest".into()).into());
        }
        assemble(manifest, read).map_err(|e| damaged(format!("{e:#}")).into())
    }
}

/// Reads what the model in `dir` says of itself.
pub fn manifest(dir: &Path) -> anyhow::Result<Manifest> {
    let path = dir.join(MANIFEST);
    let text = storage::read(&path).map_err(|e| {
        Fault::user(format!("there is no exported model in {}", dir.display()))
            .because(e)
            .hint("`elasticdl export JOB --out DIR` writes one, and so does a job with an output")
    })?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|e| {
        Fault::user(format!("{} is damaged", path.display())).because(e).hint("export the model again")
    })?;
    if manifest.format != FORMAT {
        let what = format!("{} has format {}, this program reads {FORMAT}", path.display(), manifest.format);
        return Err(Fault::user(what).hint("export the model again").into());
    }
    Ok(manifest)
}

/// A tensor as it was read.
enum Values {
    Numbers(Vec<f32>),
    Ids(Vec<u64>),
}

/// Reads a safetensors file from its start to its end, once.
struct Reader {
    file: Source,
    crc: crc32fast::Hasher,
}

impl Reader {
    fn tensors(&mut self) -> anyhow::Result<BTreeMap<String, (Vec<usize>, Values)>> {
        const HEADER_BYTES_MAX: u64 = 100_000_000;
        let mut length = [0; 8];
        self.take(&mut length)?;
        let length = u64::from_le_bytes(length);
        anyhow::ensure!(length <= HEADER_BYTES_MAX, "its header is said to have {length} bytes");
        let mut header = vec![0; length as usize];
        self.take(&mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header)?;
        let mut tensors = BTreeMap::new();
        for name in metadata.offset_keys() {
            let info = metadata.info(&name).context("a name of the header is in the header")?;
            let values = self.values(info)?;
            tensors.insert(name, (info.shape.clone(), values));
        }
        Ok(tensors)
    }

    fn values(&mut self, info: &TensorInfo) -> anyhow::Result<Values> {
        let count = info.shape.iter().product();
        match info.dtype {
            Dtype::F32 => {
                let mut values = vec![0f32; count];
                self.take(bytemuck::cast_slice_mut(&mut values))?;
                Ok(Values::Numbers(values))
            }
            Dtype::U64 => {
                let mut values = vec![0u64; count];
                self.take(bytemuck::cast_slice_mut(&mut values))?;
                Ok(Values::Ids(values))
            }
            other => anyhow::bail!("it holds numbers of type {other:?}"),
        }
    }

    fn take(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(into)?;
        self.crc.update(into);
        Ok(())
    }
}

/// Sorts what was read into the places of the shape.
fn assemble(manifest: Manifest, mut read: BTreeMap<String, (Vec<usize>, Values)>) -> anyhow::Result<Trained> {
    let mut numbers = |name: &str, shape: &[usize]| match read.remove(name) {
        Some((found, Values::Numbers(values))) if found == shape => Ok(values),
        Some((found, _)) => anyhow::bail!("tensor {name} is {found:?}, the manifest says {shape:?}"),
        None => anyhow::bail!("tensor {name} is missing"),
    };
    let shape = &manifest.shape;
    let mut tensors = Vec::new();
    for tensor in &shape.tensors {
        tensors.push(numbers(&tensor.name, &tensor.shape)?);
    }
    let mut weights = Vec::new();
    for table in &shape.tables {
        let rows = manifest.rows.get(&table.name).copied().unwrap_or(0) as usize;
        weights.push(numbers(&format!("{}.rows", table.name), &[rows, table.width()])?);
    }
    let mut tables = Vec::new();
    for (table, weights) in shape.tables.iter().zip(weights) {
        let rows = weights.len() / table.width();
        match read.remove(&format!("{}.ids", table.name)) {
            Some((_, Values::Ids(ids))) if ids.len() == rows => {
                tables.push(Rows::new(ids, weights, table.width()))
            }
            _ => anyhow::bail!("the ids of table {} are missing or not {rows}", table.name),
        }
    }
    Ok(Trained { manifest, tensors, tables })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_id_and_unknown_ids_are_zeros() {
        let ids: Vec<u64> = (0..1000).map(|i| i * 7919).collect();
        let weights: Vec<f32> = ids.iter().flat_map(|id| [*id as f32, 1.0]).collect();
        let rows = Rows::new(ids.clone(), weights, 2);
        for id in ids {
            let at = rows.position(id) as usize;
            assert_eq!(rows.weights()[at * 2], id as f32);
        }
        let nowhere = rows.position(5) as usize;
        assert_eq!(rows.weights()[nowhere * 2..], [0.0, 0.0]);
        let empty = Rows::new(vec![], vec![], 2);
        assert_eq!((empty.position(5), empty.weights()), (0, &[0.0, 0.0][..]));
    }

    #[test]
    fn what_is_written_in_parts_is_read_by_the_safetensors_crate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(WEIGHTS);
        let tensors = vec![
            ("t.ids".to_string(), Dtype::U64, vec![2]),
            ("t.rows".to_string(), Dtype::F32, vec![2, 1]),
            ("none".to_string(), Dtype::F32, vec![0]),
        ];
        let mut writer = Writer::create(&path, tensors).unwrap();
        writer.put(bytemuck::cast_slice(&[7u64, 9])).unwrap();
        writer.put(bytemuck::cast_slice(&[0.5f32])).unwrap();
        writer.put(bytemuck::cast_slice(&[0.25f32])).unwrap();
        let (file, sum) = writer.complete().unwrap();
        assert!(!path.exists());
        file.finish().unwrap();
        let bytes = storage::read(&path).unwrap();
        assert_eq!(sum, FileSum { bytes: bytes.len() as u64, crc32: crc32fast::hash(&bytes) });
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor("t.rows").unwrap().data(), bytemuck::cast_slice::<f32, u8>(&[0.5, 0.25]));
        let mut ours = Reader { file: storage::open(&path).unwrap(), crc: crc32fast::Hasher::new() };
        let tensors = ours.tensors().unwrap();
        assert!(matches!(&tensors["t.ids"], (_, Values::Ids(ids)) if *ids == [7, 9]));
    }
}
