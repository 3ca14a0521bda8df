//! Layers from one store to another, as they are: same manifest, metadata and map, and the frames
//! of the source without compressing them again. Only what the target lacks moves.
//!
//! * A frame moves if the target lacks one of the layer's chunks in it. Its stored bytes are
//!   checked against its digest and, decompressed, each chunk against the layer's map, by several
//!   threads; what fails is an error that names the source's pack and range.
//! * Several layers share one session: one look at the target's index, packs that hold frames of
//!   many layers. The session ends when it holds as much as [`TransferOptions::session_bytes`];
//!   its packs and index are durable then, so a transfer that is interrupted goes on from there.
//! * The order of writes is that of publishing (FORMAT.md). Signatures and profiles of a layer
//!   come before its reference, so that whoever sees the reference can check it.
//! * A target that has the version with the same manifest has the layer, unless it is only a part
//!   of one (`seeds/`, FORMAT.md) or [`TransferOptions::recheck`] is set.
//!
//! Memory: metadata and map of one layer, what [`LayerWriter`] needs for the chunks of a session,
//! and a bounded number of requests of at most 2 MiB (8 MiB decompressed).

mod attached;
mod plan;
mod seed;
mod select;

pub use seed::{Environment, SeedOptions, SeedReport, SeededLayer, seed};
pub use select::{Selection, is_pattern, matches, select};

use std::collections::HashSet;

use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::format::locator::Locator;
use crate::format::map::LayerMap;
use crate::key::Key;
use crate::layer::{LayerStore, LayerWriter, PublishOutcome, Sealed, StoredFrame, WriterOptions};
use crate::manifest::Manifest;
use crate::parallel::{Bounds, Order, for_each};
use crate::reference::Reference;
use plan::{Planned, Request};

/// Bytes of requests under way, stored and raw.
const MAX_MEMORY: u64 = 96 << 20;

/// How layers are moved.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TransferOptions {
    /// How metadata, maps and the few frames that are made anew are written.
    pub writer: WriterOptions,
    /// Requests to the source under way at once; each has a thread that also verifies.
    pub connections: usize,
    /// Bytes of frames after which packs and index are made durable.
    pub session_bytes: u64,
    /// Look at layers that the target has, too: damage there is healed as by publishing again.
    pub recheck: bool,
    /// Frames that hold more than their layer uses do not move whole: the layer's chunks in them
    /// are written to new frames, so that nothing else goes along, such as what was removed before
    /// the layer was built. What the target has stays as it is there.
    pub reframe: bool,
}

impl Default for TransferOptions {
    fn default() -> Self {
        Self {
            writer: WriterOptions::default(),
            connections: 8,
            session_bytes: 256 << 20,
            recheck: false,
            reframe: false,
        }
    }
}

/// What moving a layer did. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransferredLayer {
    /// The layer.
    pub reference: Reference,
    /// Digest of its manifest.
    pub digest: Digest,
    /// Whether the target has it newly.
    pub outcome: PublishOutcome,
    /// Frames that moved.
    pub moved_frames: u64,
    /// Their stored bytes.
    pub moved_bytes: u64,
    /// Frames whose chunks the target had.
    pub reused_frames: u64,
    /// Their stored bytes.
    pub reused_bytes: u64,
    /// Range requests to the source for frames and packs' tables.
    pub requests: u64,
    /// Signatures and profiles that moved.
    pub attached: u64,
}

/// What a transfer did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TransferReport {
    /// Layers in the order in which they were published.
    pub layers: Vec<TransferredLayer>,
    /// Bytes read from the source's packs, gaps between frames and tables included.
    pub read_bytes: u64,
    /// Bytes written to the target, all objects together.
    pub written_bytes: u64,
    /// Damage found in the target and worked around or healed, one line each.
    pub warnings: Vec<String>,
}

/// A step of a transfer.
#[derive(Debug, Clone, Copy)]
pub enum TransferStep<'a> {
    /// A layer's turn: bytes of frames that it will move, as stored.
    Layer {
        /// The layer.
        reference: &'a Reference,
        /// Stored bytes that the target lacks.
        bytes: u64,
    },
    /// Stored bytes moved since the last step.
    Moved(u64),
}

/// Copies layers, each a manifest digest and its manifest, from `source` to `target` in the order
/// given: parents first.
///
/// # Errors
/// [`StoreError::Conflict`], before anything is moved, if the target has one of the versions with
/// other content; damage of the source, naming the object; what either store fails with. Layers
/// published before the error stay, and what was moved is found by the next run.
pub fn transfer(
    source: &LayerStore,
    target: &LayerStore,
    layers: &[(Digest, Manifest)],
    options: &TransferOptions,
    progress: &mut dyn FnMut(TransferStep<'_>),
) -> Result<TransferReport> {
    let mut seen = HashSet::new();
    let mut todo = Vec::new();
    for (digest, manifest) in layers.iter().filter(|(digest, _)| seen.insert(*digest)) {
        todo.push((*digest, manifest, has_layer(target, digest, manifest)?));
    }
    let mut session = Session {
        source,
        target,
        options,
        writer: None,
        waiting: Vec::new(),
        since: 0,
        report: TransferReport::default(),
    };
    for (digest, manifest, present) in todo {
        let moved = if present && !options.recheck {
            session.already(digest, manifest)
        } else {
            session.layer(digest, manifest, progress)
        };
        if let Err(error) = moved {
            session.give_up();
            return Err(error);
        }
    }
    session.publish()?;
    Ok(session.report)
}

/// Whether the target has this layer, whole.
fn has_layer(target: &LayerStore, digest: &Digest, manifest: &Manifest) -> Result<bool> {
    let reference = manifest.reference();
    match target.resolve(&reference) {
        Ok(existing) if &existing == digest => Ok(target
            .blobs()
            .size(&Key::seed(&manifest.map.digest))?
            .is_none()),
        Ok(existing) => Err(StoreError::Conflict {
            reference: Box::new(reference),
            store: target.url().to_owned(),
            existing,
            new: *digest,
        }),
        Err(StoreError::UnknownReference { .. } | StoreError::NoStore { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// A run of layers that share a writer.
struct Session<'a> {
    source: &'a LayerStore,
    target: &'a LayerStore,
    options: &'a TransferOptions,
    writer: Option<LayerWriter>,
    /// Layers whose frames are with the writer.
    waiting: Vec<(Manifest, TransferredLayer)>,
    /// Bytes moved since packs and index were made durable.
    since: u64,
    report: TransferReport,
}

impl Session<'_> {
    /// A layer that the target has: what is attached to it may be new.
    fn already(&mut self, digest: Digest, manifest: &Manifest) -> Result<()> {
        let mut layer = fresh(digest, manifest);
        let reused = attached::copy(self.source, self.target, &digest, manifest)?;
        layer.outcome = PublishOutcome::Already;
        layer.attached = reused.objects;
        self.report.written_bytes += reused.bytes;
        self.waiting.push((manifest.clone(), layer));
        Ok(())
    }

    fn layer(
        &mut self,
        digest: Digest,
        manifest: &Manifest,
        progress: &mut dyn FnMut(TransferStep<'_>),
    ) -> Result<()> {
        let mut layer = fresh(digest, manifest);
        let map = self.source.map(manifest)?;
        let mut locator = self.source.locator(manifest, &map)?;
        loop {
            match self.frames(&map, &locator, None, &mut layer, progress) {
                Ok(()) => break,
                // The source may have been compacted meanwhile.
                Err(error) if error.is_damage() => {
                    let newer = self.source.locator(manifest, &map)?;
                    if newer == locator {
                        return Err(error);
                    }
                    locator = newer;
                }
                Err(error) => return Err(error),
            }
        }
        self.waiting.push((manifest.clone(), layer));
        if self.since >= self.options.session_bytes {
            self.publish()?;
        }
        Ok(())
    }

    /// Moves the frames of a layer, or these of them, that the target lacks.
    fn frames(
        &mut self,
        map: &LayerMap,
        locator: &Locator,
        only: Option<&HashSet<u32>>,
        layer: &mut TransferredLayer,
        progress: &mut dyn FnMut(TransferStep<'_>),
    ) -> Result<()> {
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => self.target.writer(self.options.writer.clone())?,
        };
        let reframe = self.options.reframe;
        let plan = Planned::new(self.source, &mut writer, map, locator, only, reframe);
        self.writer = Some(writer);
        let plan = plan?;
        layer.reused_frames = plan.reused_frames;
        layer.reused_bytes = plan.reused_bytes;
        layer.requests += plan.table_requests;
        self.report.read_bytes += plan.table_bytes;
        progress(TransferStep::Layer {
            reference: &layer.reference,
            bytes: plan.moved_bytes,
        });
        let mut rest = plan.requests.as_slice();
        while !rest.is_empty() {
            let room = self.options.session_bytes.saturating_sub(self.since);
            let mut bytes = 0;
            let count = rest
                .iter()
                .take_while(|request| {
                    let begin = bytes == 0 || bytes < room;
                    bytes += request.bytes();
                    begin
                })
                .count();
            let (now, later) = rest.split_at_checked(count).unwrap_or((rest, &[]));
            rest = later;
            self.requests(locator, now, layer, progress)?;
            if self.since >= self.options.session_bytes {
                self.checkpoint()?;
            }
        }
        Ok(())
    }

    fn requests(
        &mut self,
        locator: &Locator,
        requests: &[Request],
        layer: &mut TransferredLayer,
        progress: &mut dyn FnMut(TransferStep<'_>),
    ) -> Result<()> {
        let Some(writer) = self.writer.as_mut() else {
            return Ok(()); // taken only by `checkpoint` and `publish`
        };
        let source = self.source;
        let connections = self.options.connections.clamp(1, 64);
        let (since, report) = (&mut self.since, &mut self.report);
        let bounds = Bounds {
            threads: connections,
            bytes: MAX_MEMORY,
        };
        for_each(
            requests,
            bounds,
            Order::Kept,
            Request::weight,
            |request| {
                let frames = request.fetch(source, locator)?;
                Ok((request.bytes(), frames))
            },
            |_, fetched: Result<(u64, Vec<StoredFrame>)>| {
                let (read, frames) = fetched?;
                layer.requests += 1;
                report.read_bytes += read;
                for frame in frames {
                    let len = frame.stored_len();
                    writer.add_stored_frame(frame)?;
                    layer.moved_frames += 1;
                    layer.moved_bytes += len;
                    *since += len;
                    progress(TransferStep::Moved(len));
                }
                Ok(())
            },
        )
    }

    /// Makes packs and index durable and goes on.
    fn checkpoint(&mut self) -> Result<()> {
        if let Some(writer) = self.writer.take() {
            self.writer = Some(writer.seal()?.reopen()?);
        }
        self.since = 0;
        Ok(())
    }

    /// Publishes the layers that wait.
    fn publish(&mut self) -> Result<()> {
        self.since = 0;
        let mut sealed: Option<Sealed> = self.writer.take().map(LayerWriter::seal).transpose()?;
        for (manifest, mut layer) in std::mem::take(&mut self.waiting) {
            if layer.outcome == PublishOutcome::Created
                && let Some(sealed) = sealed.as_mut()
            {
                let attached = attached::copy(self.source, self.target, &layer.digest, &manifest)?;
                layer.attached = attached.objects;
                self.report.written_bytes += attached.bytes;
                let meta = self.source.meta(&manifest)?;
                let map = self.source.map(&manifest)?;
                let published = sealed.publish(&manifest, &meta, &map)?;
                layer.outcome = published.outcome;
                self.report.warnings.extend(published.warnings);
                // It is whole now.
                self.target
                    .blobs()
                    .delete(&Key::seed(&manifest.map.digest))?;
            }
            self.report.layers.push(layer);
        }
        self.report.written_bytes += sealed.map_or(0, |s| s.stats().new_bytes);
        Ok(())
    }

    /// After an error: what was moved is kept for the next run if that is still possible.
    fn give_up(&mut self) {
        if let Some(writer) = self.writer.take()
            && let Err(error) = writer.seal()
        {
            tracing::debug!("what was moved is not kept: {error}");
        }
    }
}

fn fresh(digest: Digest, manifest: &Manifest) -> TransferredLayer {
    TransferredLayer {
        reference: manifest.reference(),
        digest,
        outcome: PublishOutcome::Created,
        moved_frames: 0,
        moved_bytes: 0,
        reused_frames: 0,
        reused_bytes: 0,
        requests: 0,
        attached: 0,
    }
}
