//! Checkpoints are read with pyarrow, by the very lines that docs/checkpoints.md has for it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use elasticdl_ps::checkpoint::{Head, Layer, path_of, read_head, restore};
use elasticdl_ps::table::Words;
use elasticdl_ps::{Model, Partition, Table};
use elasticdl_spec::{PartitionId, TablesSpec};
use serde::Deserialize;
use serde_json::Value;

use super::bounds::sum;
use super::chaos::chains;
use super::world::{World, said, wait_for};

/// Weights and slots.
type Floats = (Vec<f32>, Vec<f32>);

/// What a partition's files hold.
struct Found {
    /// By table and id.
    rows: BTreeMap<(String, u64), Floats>,
    /// By name.
    tensors: BTreeMap<String, Floats>,
    /// All that is neither; counts of ids without a row and bits of those that were used among it.
    head: Head,
}

/// What Python tells of a partition.
#[derive(Deserialize)]
struct Told {
    rows: Vec<(String, u64, Vec<f32>, Vec<f32>)>,
    tensors: BTreeMap<String, Floats>,
    /// By name: counts of ids without a row, and bits of rows that were used.
    words: BTreeMap<String, Vec<u64>>,
    head: Head,
    /// Ids that gave their rows' numbers to others along the chain, and those others.
    followed: Vec<(u64, u64)>,
}

/// A checkpoint, read.
struct Read {
    partitions: Vec<Found>,
    followed: Vec<(u64, u64)>,
}

/// A Python that has pyarrow; `None` says aloud that a test is skipped.
fn python() -> Option<PathBuf> {
    let python = std::env::var_os("ELASTICDL_TEST_PYTHON").map(PathBuf::from);
    if python.is_none() {
        eprintln!("skipped: ELASTICDL_TEST_PYTHON names no Python with pyarrow; `cargo xtask test` does");
    }
    python
}

/// The function `read` of the document.
fn recipe() -> &'static str {
    let document = include_str!("../../../../docs/checkpoints.md");
    let block = document.split("```python\n").nth(1).and_then(|rest| rest.split("```").next());
    block.expect("the document has lines of Python")
}

/// What is done with it here; and who followed whom under a row's number, from one file of a chain to the next.
const CALL: &str = r#"
import sys

def followed(ckpt, checkpoint, partition):
    manifest = json.load(open(f"{ckpt}/checkpoint-{checkpoint:06}/manifest.json"))
    earlier = [file["checkpoint"] for file in manifest["partitions"][str(partition)].get("earlier", [])]
    pairs, owners = [], {}
    for each in [*earlier, checkpoint]:
        table = ipc.open_file(f"{ckpt}/checkpoint-{each:06}/partition-{partition:03}.arrow").read_all()
        numbers = table["number"].to_pylist() if "number" in table.column_names else []
        for id, number in zip(table["id"].to_pylist(), numbers):
            before = owners.get(number, id)
            if number is not None:
                owners[number] = id
                pairs += [(before, id)] if before != id else []
    return pairs

def told(ckpt, checkpoint, partition):
    rows, tensors, words, head = read(ckpt, checkpoint, partition)
    rows = [[table, id, *floats] for (table, id), floats in rows.items()]
    pairs = followed(ckpt, checkpoint, partition)
    return {"rows": rows, "tensors": tensors, "words": words, "head": head, "followed": pairs}

print(json.dumps([told(sys.argv[1], int(sys.argv[2]), partition) for partition in range(4)]))
"#;

/// What the document's lines find in a checkpoint.
fn by_pyarrow(world: &World, python: &Path, dir: &Path, checkpoint: u64) -> Vec<Told> {
    world.write("read.py", &format!("{}{CALL}", recipe()));
    let mut command = Command::new(python);
    command.arg(world.path("read.py")).arg(dir).arg(checkpoint.to_string());
    serde_json::from_str(&said(&mut command).ok()).unwrap()
}

impl Told {
    /// In the form of what a server holds, which knows of no files.
    fn found(self) -> Found {
        let all = self.rows.len();
        let rows = self.rows.into_iter().map(|(table, id, weights, slots)| ((table, id), (weights, slots)));
        let rows = BTreeMap::from_iter(rows);
        assert_eq!(rows.len(), all, "a row comes once");
        let mut head = Head { checkpoint: 0, base: None, rows: self.head.rows_of_all.clone(), ..self.head };
        for (bounds, table) in head.bounds.iter_mut().zip(&head.shape.tables) {
            let words = |what: &str| self.words.get(&format!("{what} of {}", table.name)).cloned();
            (bounds.strangers, bounds.used) =
                (Words(words("counts").unwrap_or_default()), Words(words("used").unwrap_or_default()));
        }
        Found { rows, tensors: self.tensors, head }
    }
}

/// What a server restores from a partition's files.
pub(super) fn restored(chain: &[Layer], partition: PartitionId, tables: &TablesSpec) -> Partition {
    let head = read_head(&path_of(&chain.last().unwrap().dir, partition)).unwrap();
    let model = Model::new(&head.job, head.shape, head.optimizer, head.seed, head.partitions);
    restore(&Arc::new(model.with_tables(tables)), partition, head.incarnation, chain).unwrap()
}

/// The same in the form of what Python tells.
fn by_us(chain: &[Layer], partition: PartitionId, tables: &TablesSpec) -> Found {
    let restored = restored(chain, partition, tables);
    let rows_of = |table: &Table| {
        let (mut weights, mut slots) = (Vec::new(), Vec::new());
        table.copy_rows(0..table.len(), &mut weights, &mut slots);
        let (width, name) = (table.shape().width(), table.shape().name.clone());
        let floats = weights.chunks_exact(width).zip(slots.chunks_exact(table.slots()));
        let floats = floats.map(|(weights, slots)| (weights.to_vec(), slots.to_vec())).collect::<Vec<_>>();
        table.ids().into_iter().map(move |id| (name.clone(), id)).zip(floats)
    };
    let tensors = restored.tensors().iter();
    let tensors = tensors.map(|t| (t.shape().name.clone(), (t.values().to_vec(), t.slots().to_vec())));
    let head = restored.head();
    Found { rows: restored.tables().iter().flat_map(rows_of).collect(), tensors: tensors.collect(), head }
}

/// Ids that each have two records, one behind the other.
const IDS: u64 = 20_000;

/// Trains until there is a checkpoint that adds to earlier ones, and reads it in both ways, which agree.
fn reads_the_same(optimizer: &str, tables: &str, until: impl Fn(&World)) -> Option<Read> {
    let python = python()?;
    let world = World::new();
    for file in 0..4 {
        let ids = (0..IDS).filter(|id| id % 4 == file);
        let lines: String = ids.map(|id| format!("{},{},id{id}\n", id % 2, id % 7).repeat(2)).collect();
        world.write(&format!("data/part-{file}.csv"), &format!("label,x,id\n{lines}"));
    }
    // Small batches change few rows from one checkpoint to the next. None is removed while it is read.
    world.write("ctr.yaml", &format!(
        "apiVersion: elasticdl.org/v1\nkind: ElasticJob\nmetadata: {{ name: ctr }}\nspec:\n  \
         model: {{ zoo: deepfm, embedding_dim: 4, hidden: [8] }}\n  \
         data: {{ train: data/*.csv, layout: custom, label: label, numeric: [x], categorical: [id], batches_per_task: 8 }}\n  \
         train: {{ batch: 2, epochs: 1000, optimizer: {optimizer} }}\n  tables: {tables}\n  \
         servers: {{ count: 2, partitions: 4 }}\n  workers: {{ count: 2 }}\n  \
         checkpoint: {{ every: 100ms, full_every: 9, keep: 10000 }}\n"
    ));
    let mut job = world.start(&["train", "ctr.yaml"]);
    job.until_training();
    until(&world);
    // Events of before are still to be read.
    let seen = world.status("ctr")["checkpoint"].as_u64();
    let adds = |e: &Value| {
        e["event"] == "checkpoint" && e["adding"].as_u64() > Some(0) && e["checkpoint"].as_u64() > seen
    };
    let checkpoint = job.until("a checkpoint that adds to others", adds)["checkpoint"].as_u64().unwrap();
    world.run(&["stop", "ctr"]).ok();

    let dir = world.job_dir("ctr").join("checkpoint");
    let chains = chains(&dir.join(format!("checkpoint-{checkpoint:06}")));
    assert!(chains.iter().any(|chain| chain.len() > 1), "files that add to others: {chains:?}");
    let tables: TablesSpec = serde_json::from_str(tables).unwrap();
    let (mut partitions, mut followed) = (Vec::new(), Vec::new());
    let told = by_pyarrow(&world, &python, &dir, checkpoint);
    assert_eq!(told.len(), chains.len());
    for ((mut told, chain), partition) in told.into_iter().zip(&chains).zip((0..).map(PartitionId)) {
        followed.append(&mut told.followed);
        let base = chain.iter().rev().nth(1).map(|layer| layer.checkpoint);
        assert_eq!((told.head.checkpoint, told.head.base), (checkpoint, base), "{partition}");
        let (found, ours) = (told.found(), by_us(chain, partition, &tables));
        assert_eq!(found.head, ours.head, "{partition}");
        assert_eq!(found.tensors, ours.tensors, "{partition}");
        assert_eq!(found.rows.len(), ours.rows.len(), "{partition}");
        let other = found.rows.iter().find(|(row, floats)| ours.rows.get(row) != Some(floats));
        assert_eq!(other, None, "{partition}: a row that is another one to a server");
        partitions.push(found);
    }
    Some(Read { partitions, followed })
}

#[test]
fn a_chain_of_files_is_read_as_the_document_says() {
    let Some(Read { partitions, followed }) = reads_the_same("adam", "{}", |_| {}) else { return };
    // Adam has two slots for each weight, and its steps: 1 + 4 weights in a row.
    for Found { rows, head, .. } in &partitions {
        assert!(rows.values().all(|(weights, slots)| (weights.len(), slots.len()) == (5, 11)), "{rows:?}");
        assert_eq!((rows.len() as u64, head.format, head.bounds.len()), (head.rows_of_all[0], 2, 0));
        assert!(head.version > 0 && !head.audit.epochs().is_empty());
    }
    assert!(partitions.iter().all(|found| found.rows.values().any(|(_, slots)| slots[10] > 1.0)), "trained");
    let tensors: Vec<&Floats> = partitions.iter().flat_map(|found| found.tensors.values()).collect();
    assert_eq!(tensors.len(), partitions[0].head.shape.tensors.len());
    assert!(tensors.iter().all(|(values, slots)| slots.len() == 2 * values.len() + 1));
    assert_eq!(followed, []);
}

/// Goal: a row that makes room for another one gives it its number, and is gone for who reads on; counts are no rows.
#[test]
fn a_chain_of_a_table_with_a_bound_is_read_as_the_document_says() {
    let evicted = |world: &World| {
        wait_for("rows to go", || (sum(&world.status("ctr"), "evicted") > 0).then_some(()));
    };
    let tables = r#"{ "*": { "memory_max": "512Ki", "admit_after": 2 } }"#;
    let Some(Read { partitions, followed }) = reads_the_same("adagrad", tables, evicted) else { return };
    for Found { rows, head, .. } in &partitions {
        assert!(rows.values().all(|(weights, slots)| (weights.len(), slots.len()) == (5, 5)), "{rows:?}");
        let bounds = &head.bounds[0];
        assert!(bounds.counts.refused > 0, "{bounds:?}");
        assert!(!bounds.strangers.is_empty() && !bounds.used.is_empty(), "{bounds:?}");
        assert_eq!((rows.len() as u64, head.format), (head.rows_of_all[0], 4));
    }
    assert!(partitions.iter().any(|found| found.head.bounds[0].counts.evicted > 0));
    let has_row =
        |id: &u64| partitions.iter().any(|found| found.rows.contains_key(&("embedding".into(), *id)));
    let gone = followed.iter().filter(|(before, after)| !has_row(before) && has_row(after));
    assert!(gone.count() > 0, "numbers that others have now: {followed:?}");
}
