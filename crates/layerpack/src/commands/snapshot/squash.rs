//! `layerpack snapshot squash`: one layer of a snapshot and the diffs below it, or of everything.

use anyhow::Context as _;
use layerpack_packer::MergeOptions;
use layerpack_store::{Kind, LayerName, Reference, Version};

use super::super::build::labels;
use super::super::{Outcome, merge};
use super::open;
use crate::args::SnapshotSquashArgs;
use crate::context::Context;
use crate::signing::Signer;

pub(super) fn run(context: &Context, args: SnapshotSquashArgs) -> Outcome {
    let signer = Signer::new(&args.sign)?;
    let labels = labels(&args.label)?;
    let store = context.store()?;
    let (snapshot, below) = open(&store, &args.reference)?;
    let from = match args.all {
        true => 0,
        false => below
            .iter()
            .rposition(|layer| layer.manifest.kind != Kind::Diff)
            .map_or(0, |last| last + 1),
    };
    let mut layers = Vec::new();
    for layer in below.iter().skip(from).chain([&snapshot]) {
        let reference: Reference = layer.name.parse().with_context(|| {
            format!("a layer below {} has no name to merge it by", snapshot.name)
        })?;
        layers.push(reference);
    }
    let kind = match args.all {
        true => below
            .first()
            .map_or(Kind::Diff, |layer| layer.manifest.kind),
        false => Kind::Diff,
    };
    let reference = Reference::new(
        kind,
        LayerName::new(&args.name)?,
        Version::new(&args.version)?,
    );
    let mut options = MergeOptions::new(reference, layers);
    options.labels = labels;
    // What was removed must not come along in the frames of what was not.
    options.reframe = true;
    merge::publish(context, &store, &options, &signer)
}
