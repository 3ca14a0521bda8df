//! Layers from one store to another.

use std::sync::Arc;

use layerpack_store::transfer::{
    Selection, TransferOptions, TransferReport, TransferStep, select, transfer,
};
use layerpack_store::{
    BlobStore, Draft, Fault, FaultStore, Key, LayerStore, MemStore, ParentRef, PublishOutcome,
    PutMode, Result, StoreError,
};

use crate::support::{
    add, data_of, lay_out, memory, noise, options, publish, read_all, reference, sample, text,
};

fn settings() -> TransferOptions {
    let mut settings = TransferOptions::default();
    settings.writer = options();
    settings.connections = 3;
    settings
}

fn names(patterns: &[&str]) -> Selection {
    Selection {
        patterns: patterns.iter().map(|p| (*p).to_owned()).collect(),
        ..Selection::default()
    }
}

fn copy_with(
    from: &LayerStore,
    to: &LayerStore,
    patterns: &[&str],
    settings: &TransferOptions,
) -> Result<TransferReport> {
    let layers = select(from, &names(patterns))?;
    transfer(from, to, &layers, settings, &mut |_| {})
}

fn copy(from: &LayerStore, to: &LayerStore, patterns: &[&str]) -> Result<TransferReport> {
    copy_with(from, to, patterns, &settings())
}

fn moved(report: &TransferReport) -> u64 {
    report.layers.iter().map(|l| l.moved_bytes).sum()
}

#[test]
fn a_copy_is_the_same_layer() {
    let (_, from) = memory();
    let (_, to) = memory();
    let files = sample(1);
    let original = publish(&from, "base/a:1", &files).unwrap();
    let report = copy(&from, &to, &["base/a:1"]).unwrap();
    let layer = report.layers.first().unwrap();
    assert_eq!(layer.digest, original.digest);
    assert_eq!(layer.outcome, PublishOutcome::Created);
    assert!(layer.moved_frames > 0 && layer.reused_frames == 0);
    assert_eq!(to.resolve(&reference("base/a:1")).unwrap(), original.digest);
    assert_eq!(read_all(&to, "base/a:1").unwrap(), data_of(&files));
    let verified = to.verify(&reference("base/a:1")).unwrap();
    assert!(
        verified.is_ok() && verified.warnings.is_empty(),
        "{verified:?}"
    );
    assert!(to.verify_index().unwrap().is_empty());
    // Frames were not compressed again: each is in the source under the same digest.
    let frames = |store: &LayerStore| {
        let (_, manifest) = store.load(&reference("base/a:1")).unwrap();
        let map = store.map(&manifest).unwrap();
        let locator = store.locator(&manifest, &map).unwrap();
        let mut digests: Vec<_> = locator.frames().iter().map(|f| f.digest).collect();
        digests.sort();
        digests
    };
    assert_eq!(frames(&from), frames(&to));
}

#[test]
fn only_what_is_missing_moves() {
    let (_, from) = memory();
    let (_, to) = memory();
    let old = vec![noise(1, 900_000), text(2, 300_000)];
    let mut new = old.clone();
    new.push(noise(3, 200_000));
    publish(&from, "base/a:1", &old).unwrap();
    publish(&from, "base/a:2", &new).unwrap();
    let first = moved(&copy(&from, &to, &["base/a:1"]).unwrap());
    let report = copy(&from, &to, &["base/a:2"]).unwrap();
    let second = report.layers.first().unwrap();
    assert!(first > 900_000, "{first}");
    assert!(
        (200_000..260_000).contains(&second.moved_bytes),
        "{second:?}"
    );
    assert!(second.reused_bytes > 900_000, "{second:?}");
    assert_eq!(read_all(&to, "base/a:2").unwrap(), data_of(&new));
    // A second time: nothing.
    let again = copy(&from, &to, &["base/*:*"]).unwrap();
    assert_eq!(moved(&again), 0);
    assert!(
        again
            .layers
            .iter()
            .all(|l| l.outcome == PublishOutcome::Already)
    );
    assert_eq!(again.written_bytes, 0);
}

#[test]
fn few_missing_chunks_of_a_frame_move_alone() {
    let (_, from) = memory();
    let (_, to) = memory();
    // Small files: many chunks share a frame.
    let files: Vec<Vec<u8>> = (0..30).map(|i| noise(i, 2000)).collect();
    publish(&from, "base/all:1", &files).unwrap();
    publish(&to, "base/most:1", files.get(..29).unwrap()).unwrap();
    let report = copy(&from, &to, &["base/all:1"]).unwrap();
    assert_eq!(report.layers.first().unwrap().moved_frames, 1);
    assert!(report.written_bytes < 20_000, "{report:?}");
    assert_eq!(read_all(&to, "base/all:1").unwrap(), data_of(&files));
    assert!(to.verify(&reference("base/all:1")).unwrap().is_ok());
}

#[test]
fn chunks_of_other_layers_in_a_frame_are_known_at_the_target() {
    let (_, from) = memory();
    let (_, to) = memory();
    let files: Vec<Vec<u8>> = (0..30).map(|i| noise(i, 2000)).collect();
    publish(&from, "base/all:1", &files).unwrap();
    publish(&from, "base/half:1", files.get(..16).unwrap()).unwrap();
    // The frame of `all` comes with `half`; the rest of its chunks are found then.
    copy(&from, &to, &["base/half:1"]).unwrap();
    let report = copy(&from, &to, &["base/all:1"]).unwrap();
    assert_eq!(moved(&report), 0, "{report:?}");
    assert_eq!(read_all(&to, "base/all:1").unwrap(), data_of(&files));
}

#[test]
fn another_content_is_a_conflict_before_anything_moves() {
    let (_, from) = memory();
    let (blobs, to) = memory();
    publish(&from, "base/a:1", &sample(1)).unwrap();
    publish(&from, "base/b:1", &sample(2)).unwrap();
    publish(&to, "base/b:1", &sample(3)).unwrap();
    let before = blobs.list("").unwrap();
    let error = copy(&from, &to, &["base/a:1", "base/b:1"]).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }), "{error}");
    assert_eq!(blobs.list("").unwrap(), before);
}

/// Whether these bytes are in one of the store's packs. What does not compress is stored as it is.
fn packs_hold(blobs: &Arc<dyn BlobStore>, bytes: &[u8]) -> bool {
    blobs.list("packs/").unwrap().iter().any(|object| {
        let pack = blobs.get(&object.key, u64::MAX).unwrap().unwrap();
        pack.windows(bytes.len()).any(|window| window == bytes)
    })
}

/// A file that was removed before a layer was built shares a frame with others of the layer. The
/// frame moves whole, unless it is to be made anew.
#[test]
fn what_a_layer_does_not_have_stays_behind() {
    let (source, from) = memory();
    let secret = noise(99, 700);
    let mut files = vec![noise(1, 9000), secret.clone(), noise(2, 9000)];
    publish(&from, "base/a:1", &files).unwrap();
    files.remove(1);
    let second = publish(&from, "base/a:2", &files).unwrap();
    assert_eq!(second.stats.new_chunks, 0, "they share their frames");
    assert!(packs_hold(&source, &secret));

    let (blobs, to) = memory();
    copy(&from, &to, &["base/a:2"]).unwrap();
    assert!(packs_hold(&blobs, &secret));

    let mut anew = settings();
    anew.reframe = true;
    let (blobs, to) = memory();
    let report = copy_with(&from, &to, &["base/a:2"], &anew).unwrap();
    assert_eq!(report.layers[0].digest, second.digest);
    assert!(!packs_hold(&blobs, &secret));
    assert!(packs_hold(&blobs, &files[1]));
    assert_eq!(read_all(&to, "base/a:2").unwrap(), data_of(&files));
    let verified = to.verify(&reference("base/a:2")).unwrap();
    assert!(verified.is_ok() && verified.warnings.is_empty());
    // Nothing moves twice, and what the target has is not touched.
    let again = copy_with(&from, &to, &["base/a:2"], &anew).unwrap();
    assert_eq!(moved(&again), 0);

    // To the layer that has it, it goes along.
    let (blobs, to) = memory();
    copy_with(&from, &to, &["base/a:1"], &anew).unwrap();
    assert!(packs_hold(&blobs, &secret));
    assert!(to.verify(&reference("base/a:1")).unwrap().is_ok());
}

fn diff_on(store: &LayerStore, name: &str, below: &str, files: &[Vec<u8>]) {
    let mut writer = store.writer(options()).unwrap();
    let chunks = add(&mut writer, files).unwrap();
    let mut draft = Draft::new(reference(name), text(7, 3000), lay_out(&chunks));
    draft.parents = vec![ParentRef {
        reference: Some(reference(below)),
        manifest: store.resolve(&reference(below)).unwrap(),
    }];
    writer.finish(draft).unwrap();
}

#[test]
fn parents_of_diffs_come_first() {
    let (_, from) = memory();
    let (_, to) = memory();
    publish(&from, "base/a:1", &sample(1)).unwrap();
    publish(&from, "base/other:1", &sample(5)).unwrap();
    diff_on(&from, "diff/x:1", "base/a:1", &sample(2));
    diff_on(&from, "diff/y:1", "diff/x:1", &sample(3));
    let report = copy(&from, &to, &["diff/y:1"]).unwrap();
    let order: Vec<String> = report
        .layers
        .iter()
        .map(|l| l.reference.to_string())
        .collect();
    assert_eq!(order, ["base/a:1", "diff/x:1", "diff/y:1"]);
    assert_eq!(read_all(&to, "diff/y:1").unwrap(), data_of(&sample(3)));
    let (_, alone) = memory();
    let selection = Selection {
        alone: true,
        ..names(&["diff/y:1"])
    };
    let layers = select(&from, &selection).unwrap();
    transfer(&from, &alone, &layers, &settings(), &mut |_| {}).unwrap();
    assert_eq!(alone.list().unwrap().len(), 1);
    // Whoever verifies is told what it cannot be mounted without.
    let report = alone.verify(&reference("diff/y:1")).unwrap();
    assert!(report.is_ok(), "{:?}", report.damaged);
    assert_eq!(report.missing_parents, ["diff/x:1"]);
    assert_eq!(report.warnings.len(), 1, "{:?}", report.warnings);
    assert!(report.warnings[0].contains("parent diff/x:1"));
    let audit = alone.audit(true).unwrap();
    assert!(audit.damaged.is_empty(), "{:?}", audit.damaged);
    assert_eq!(audit.layers[0].missing_parents, ["diff/x:1"]);
    assert!(audit.warnings.iter().any(|w| w.contains("parent diff/x:1")));
    for name in ["base/a:1", "diff/x:1", "diff/y:1"] {
        let report = to.verify(&reference(name)).unwrap();
        assert!(report.missing_parents.is_empty() && report.warnings.is_empty());
    }
    let audit = to.audit(true).unwrap();
    assert!(audit.warnings.is_empty(), "{:?}", audit.warnings);
    assert!(audit.layers.iter().all(|l| l.missing_parents.is_empty()));
    let all = Selection {
        all: true,
        ..Selection::default()
    };
    assert_eq!(select(&from, &all).unwrap().len(), 4);
    assert!(select(&from, &names(&["base/none*:*"])).is_err());
    assert!(select(&from, &names(&["base/none:1"])).is_err());
}

#[test]
fn sessions_share_packs_and_split() {
    let (_, from) = memory();
    for i in 0..3 {
        publish(&from, &format!("base/l{i}:1"), &[noise(i, 2_500_000)]).unwrap();
    }
    let packs = |blobs: &Arc<dyn BlobStore>| blobs.list("packs/").unwrap().len();
    let (blobs, to) = memory();
    copy(&from, &to, &["base/*:1"]).unwrap();
    assert_eq!(packs(&blobs), 1);
    let (blobs, to) = memory();
    let mut small = settings();
    small.session_bytes = 100_000; // within a layer
    let report = copy_with(&from, &to, &["base/*:1"], &small).unwrap();
    assert!(packs(&blobs) >= 6, "{}", packs(&blobs));
    assert_eq!(report.layers.len(), 3);
    for i in 0..3 {
        let name = format!("base/l{i}:1");
        assert_eq!(
            read_all(&to, &name).unwrap(),
            data_of(&[noise(i, 2_500_000)])
        );
        assert!(to.verify(&reference(&name)).unwrap().is_ok());
    }
}

#[test]
fn damage_of_the_source_is_named_and_never_copied() {
    let (blobs, from) = memory();
    publish(&from, "base/a:1", &[noise(1, 400_000)]).unwrap();
    let pack = blobs.list("packs/").unwrap().pop().unwrap();
    let mut bytes = blobs.get(&pack.key, 1 << 30).unwrap().unwrap();
    *bytes.get_mut(200_000).unwrap() ^= 1;
    blobs.put(&pack.key, &bytes, PutMode::Overwrite).unwrap();
    let (_, to) = memory();
    let error = copy(&from, &to, &["base/a:1"]).unwrap_err();
    assert_eq!(error.key(), Some(pack.key.as_str()), "{error}");
    assert!(to.list().unwrap().is_empty());
    // What was sound is not moved again.
    *bytes.get_mut(200_000).unwrap() ^= 1;
    blobs.put(&pack.key, &bytes, PutMode::Overwrite).unwrap();
    let report = copy(&from, &to, &["base/a:1"]).unwrap();
    assert!(report.layers.first().unwrap().moved_bytes <= 400_000);
    assert_eq!(
        read_all(&to, "base/a:1").unwrap(),
        data_of(&[noise(1, 400_000)])
    );
}

#[test]
fn rechecking_heals_the_target() {
    let (_, from) = memory();
    publish(&from, "base/a:1", &sample(1)).unwrap();
    let (blobs, to) = memory();
    copy(&from, &to, &["base/a:1"]).unwrap();
    let pack = blobs.list("packs/").unwrap().pop().unwrap();
    blobs.delete(&pack.key).unwrap();
    assert!(read_all(&to, "base/a:1").is_err());
    copy(&from, &to, &["base/a:1"]).unwrap(); // takes the reference's word
    assert!(read_all(&to, "base/a:1").is_err());
    let mut recheck = settings();
    recheck.recheck = true;
    let report = copy_with(&from, &to, &["base/a:1"], &recheck).unwrap();
    assert_eq!(
        report.layers.first().unwrap().outcome,
        PublishOutcome::Already
    );
    assert!(moved(&report) > 0);
    assert_eq!(read_all(&to, "base/a:1").unwrap(), data_of(&sample(1)));
}

#[test]
fn signatures_and_profiles_come_along() {
    let (blobs, from) = memory();
    let published = publish(&from, "base/a:1", &sample(1)).unwrap();
    let signature = Key::new(&format!(
        "signatures/{}/{}",
        published.digest.hex(),
        "ab".repeat(32)
    ));
    let profile = Key::new(&format!(
        "profiles/{}/{}",
        published.layer_id.hex(),
        "cd".repeat(32)
    ));
    for key in [&signature, &profile] {
        blobs
            .put(key.as_ref().unwrap(), b"x", PutMode::IfAbsent)
            .unwrap();
    }
    let (there, to) = memory();
    let report = copy(&from, &to, &["base/a:1"]).unwrap();
    assert_eq!(report.layers.first().unwrap().attached, 2);
    assert!(there.size(&signature.unwrap()).unwrap().is_some());
    // One that came later goes along although the layer is there.
    let late = Key::new(&format!(
        "signatures/{}/{}",
        published.digest.hex(),
        "ef".repeat(32)
    ))
    .unwrap();
    blobs.put(&late, b"y", PutMode::IfAbsent).unwrap();
    let report = copy(&from, &to, &["base/a:1"]).unwrap();
    assert_eq!(report.layers.first().unwrap().attached, 1);
    assert!(there.size(&late).unwrap().is_some());
}

#[test]
fn progress_adds_up() {
    let (_, from) = memory();
    publish(&from, "base/a:1", &sample(1)).unwrap();
    let (_, to) = memory();
    let (mut announced, mut seen) = (0, 0);
    let layers = select(&from, &names(&["base/a:1"])).unwrap();
    let report = transfer(&from, &to, &layers, &settings(), &mut |step| match step {
        TransferStep::Layer { bytes, .. } => announced += bytes,
        TransferStep::Moved(bytes) => seen += bytes,
    })
    .unwrap();
    assert_eq!(announced, seen);
    assert_eq!(moved(&report), seen);
}

/// Every call of either store fails once: the copy fails or is right, and the next one is right.
#[test]
fn any_call_may_fail() {
    let files = vec![noise(1, 150_000), text(2, 90_000)];
    for side in ["source", "target"] {
        for fault in Fault::ALL {
            let mut nth = 1;
            loop {
                let blobs: Arc<dyn BlobStore> = Arc::new(MemStore::new());
                publish(&LayerStore::new(Arc::clone(&blobs)), "base/a:1", &files).unwrap();
                let target: Arc<dyn BlobStore> = Arc::new(MemStore::new());
                let faulty = Arc::new(FaultStore::fail_nth(
                    if side == "source" {
                        Arc::clone(&blobs)
                    } else {
                        Arc::clone(&target)
                    },
                    nth,
                    fault,
                ));
                let shaky: Arc<dyn BlobStore> = faulty.clone();
                let (a, b) = if side == "source" {
                    (LayerStore::new(shaky), LayerStore::new(Arc::clone(&target)))
                } else {
                    (LayerStore::new(Arc::clone(&blobs)), LayerStore::new(shaky))
                };
                let result = copy(&a, &b, &["base/a:1"]);
                let (from, to) = (LayerStore::new(blobs), LayerStore::new(target));
                if to.has_reference(&reference("base/a:1")).unwrap() {
                    assert_eq!(
                        read_all(&to, "base/a:1").unwrap(),
                        data_of(&files),
                        "{side} {fault:?} {nth}"
                    );
                } else {
                    assert!(result.is_err(), "{side} {fault:?} {nth}");
                }
                copy(&from, &to, &["base/a:1"]).unwrap();
                assert_eq!(
                    read_all(&to, "base/a:1").unwrap(),
                    data_of(&files),
                    "{side} {fault:?} {nth}"
                );
                if faulty.calls() < nth {
                    break;
                }
                nth += 1;
            }
        }
    }
}
