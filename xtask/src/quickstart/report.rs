//! The table at the end.

use std::time::Duration;

use crate::steps::bytes;

/// One layer.
#[derive(Debug)]
pub(super) struct LayerRow {
    pub(super) reference: String,
    /// Bytes of file contents.
    pub(super) contents: u64,
    /// Bytes that the store holds for it, compressed, shared ones included.
    pub(super) stored: u64,
    /// Bytes that building it added to the store.
    pub(super) new: u64,
    pub(super) took: Duration,
}

/// One thing done with the layers on the node.
#[derive(Debug)]
pub(super) struct PhaseRow {
    pub(super) name: &'static str,
    /// Bytes fetched from the store: metadata and compressed frames.
    pub(super) fetched: u64,
    /// Bytes written to the node's cache.
    pub(super) written: u64,
    pub(super) took: Duration,
}

/// All figures of a run.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) layers: Vec<LayerRow>,
    pub(super) phases: Vec<PhaseRow>,
}

impl Report {
    /// Prints both tables.
    pub(super) fn print(&self, total: Duration) {
        println!("\nlayer                        bytes in it   in the store       new   seconds");
        for row in &self.layers {
            line(
                &row.reference,
                &[row.contents, row.stored, row.new],
                row.took,
            );
        }
        let sum = |of: fn(&LayerRow) -> u64| self.layers.iter().map(of).sum();
        let took = self.layers.iter().map(|row| row.took).sum();
        let columns = [
            sum(|row| row.contents),
            sum(|row| row.stored),
            sum(|row| row.new),
        ];
        line("all layers", &columns, took);

        println!("\non the node                      fetched        written             seconds");
        for row in &self.phases {
            phase(row.name, row.fetched, row.written, row.took);
        }
        let sum = |of: fn(&PhaseRow) -> u64| -> u64 { self.phases.iter().map(of).sum() };
        let took = self.phases.iter().map(|row| row.took).sum();
        let fetched = sum(|row| row.fetched);
        phase("all of it", fetched, sum(|row| row.written), took);
        let percent = |of: u64| (fetched * 100).checked_div(of).unwrap_or(0);
        println!(
            "\nThe node fetched {}% of what the store holds for these layers, {}% of the bytes in them.",
            percent(columns[1]),
            percent(columns[0])
        );
        println!(
            "The whole quickstart took {:.1} seconds.",
            total.as_secs_f64()
        );
    }
}

fn line(name: &str, columns: &[u64; 3], took: Duration) {
    let [a, b, c] = columns.map(bytes);
    println!(
        "{name:<26} {a:>13} {b:>14} {c:>9} {:>9.2}",
        took.as_secs_f64()
    );
}

fn phase(name: &str, fetched: u64, written: u64, took: Duration) {
    let (fetched, written) = (bytes(fetched), bytes(written));
    println!(
        "{name:<30} {fetched:>9} {written:>14} {:>19.2}",
        took.as_secs_f64()
    );
}
