//! Parts of layers in another store.

use std::sync::Arc;

use layerpack_store::profile::{Profile, ProfileEntry, ProfileLayer};
use layerpack_store::transfer::{
    SeedOptions, SeedReport, Selection, TransferOptions, seed, select, transfer,
};
use layerpack_store::{
    BlobStore, Digest, Draft, Fault, FaultStore, FileChunks, Key, LayerStore, MemStore,
    MirrorStore, PutMode, Result, StoreError,
};

use crate::faults::names_something;
use crate::support::{data_of, lay_out, memory, noise, options, read_all, reference, text};

/// 20 files of one chunk each, of 260,000 bytes and more: each is a frame of its own.
fn files() -> Vec<Vec<u8>> {
    (0..20)
        .map(|i| noise(i, 260_000 + 4000 * i as usize))
        .collect()
}

/// base/a:1 of these files.
fn publish_files(store: &LayerStore) {
    let mut writer = store.writer(options()).unwrap();
    let chunks: Vec<FileChunks> = files()
        .iter()
        .map(|bytes| FileChunks {
            chunks: vec![(writer.add_chunk(bytes).unwrap(), bytes.len() as u32)],
            size: bytes.len() as u64,
        })
        .collect();
    let draft = Draft::new(reference("base/a:1"), text(7, 3000), lay_out(&chunks));
    writer.finish(draft).unwrap();
}

/// A profile of base/a:1 that reads these extents, each in so many of 4 recordings.
fn profile(store: &LayerStore, name: &str, reads: &[(u32, u32)]) -> (Digest, Profile) {
    let (digest, manifest) = store.load(&reference("base/a:1")).unwrap();
    let map = store.map(&manifest).unwrap();
    let profile = Profile {
        name: name.to_owned(),
        layers: vec![ProfileLayer {
            layer: manifest.layer_id(),
            manifest: digest,
        }],
        recordings: 4,
        entries: (0..)
            .zip(reads)
            .map(|(rank, &(extent, count))| ProfileEntry {
                layer: 0,
                extent,
                len: map.extents()[extent as usize].len,
                count,
                rank,
                time_ms: 0,
            })
            .collect(),
    };
    let digest = store.put_profile(&profile).unwrap();
    assert_eq!(store.find_profile(name).unwrap(), (digest, profile.clone()));
    (digest, profile)
}

fn seed_with(
    from: &LayerStore,
    to: &LayerStore,
    profiles: &[(Digest, Profile)],
    max_bytes: u64,
    dry_run: bool,
) -> Result<SeedReport> {
    let options = SeedOptions {
        max_bytes,
        dry_run,
        ..SeedOptions::default()
    };
    seed(from, to, profiles, &[], &options, &mut |_| {})
}

fn chunk(store: &LayerStore, extent: usize) -> Result<Vec<u8>> {
    let (_, manifest) = store.load(&reference("base/a:1"))?;
    let map = store.map(&manifest)?;
    let locator = store.locator(&manifest, &map)?;
    let e = map.extents()[extent];
    store.read_data(&map, &locator, e.data_offset..e.end())
}

#[test]
fn what_profiles_use_is_seeded_and_the_rest_says_so() {
    let (_, from) = memory();
    publish_files(&from);
    let reads = [(3, 4), (7, 4), (11, 1)];
    let one = profile(&from, "one", &reads);
    let (_, to) = memory();
    let dry = seed_with(&from, &to, std::slice::from_ref(&one), 10 << 20, true).unwrap();
    assert!(to.list().unwrap().is_empty());
    let report = seed_with(&from, &to, std::slice::from_ref(&one), 10 << 20, false).unwrap();
    assert_eq!(
        (&dry.layers, &dry.environments),
        (&report.layers, &report.environments)
    );
    assert!(report.environments[0].is_covered());
    let layer = &report.layers[0];
    assert!(
        layer.frames >= 3 && layer.frames < layer.all_frames,
        "{layer:?}"
    );
    assert_eq!(report.frame_bytes, layer.bytes);

    for (extent, _) in reads {
        chunk(&to, extent as usize).unwrap();
    }
    let error = chunk(&to, 15).unwrap_err();
    assert!(matches!(error, StoreError::NotSeeded { .. }), "{error}");
    assert!(error.to_string().contains(from.url()), "{error}");
    let verified = to.verify(&reference("base/a:1")).unwrap();
    assert!(
        verified.is_ok() && verified.warnings.is_empty(),
        "{verified:?}"
    );
    assert_eq!(verified.absent_frames, layer.all_frames - layer.frames);
    assert!(to.verify_index().unwrap().is_empty());
    let audit = to.audit(true).unwrap();
    assert!(audit.damaged.is_empty(), "{:?}", audit.damaged);
    let part = audit.layers[0].part.as_ref().unwrap();
    assert_eq!(
        (part.present_frames, part.frames),
        (layer.frames, layer.all_frames)
    );
    let repair = to.repair(false).unwrap();
    assert!(repair.is_ok() && repair.relocated.is_empty(), "{repair:?}");
    // The profile came along.
    assert_eq!(to.profiles(None).unwrap().len(), 1);

    // What was seeded and is lost is damage all the same: it is missing.
    let (_, manifest) = to.load(&reference("base/a:1")).unwrap();
    assert!(to.seed_marker(&manifest.map.digest).unwrap().is_some());

    // With the origin as a mirror everything can be read.
    let both = MirrorStore::new(to.blobs().clone(), vec![from.blobs().clone()]);
    let both = LayerStore::new(std::sync::Arc::new(both));
    assert_eq!(read_all(&both, "base/a:1").unwrap(), data_of(&files()));
    // What is elsewhere by purpose is no damage, though the origin has it.
    let audit = both.audit(true).unwrap();
    assert!(audit.damaged.is_empty(), "{:?}", audit.damaged);
    assert!(audit.layers[0].sound && audit.layers[0].part.is_some());

    // A copy makes it whole and moves only the rest.
    let all = Selection {
        all: true,
        ..Selection::default()
    };
    let layers = select(&from, &all).unwrap();
    let moved = transfer(
        &from,
        &to,
        &layers,
        &TransferOptions::default(),
        &mut |_| {},
    )
    .unwrap();
    assert_eq!(moved.layers[0].reused_frames, layer.frames);
    assert_eq!(read_all(&to, "base/a:1").unwrap(), data_of(&files()));
    assert!(to.seed_marker(&manifest.map.digest).unwrap().is_none());
    assert_eq!(to.verify(&reference("base/a:1")).unwrap().absent_frames, 0);
    assert!(to.audit(false).unwrap().layers[0].part.is_none());
}

#[test]
fn the_budget_goes_to_what_is_used_most_for_its_bytes() {
    let (_, from) = memory();
    publish_files(&from);
    // Equal counts: the smaller frame first; a higher count beats a smaller frame.
    let one = profile(&from, "one", &[(19, 4), (0, 1), (1, 1), (18, 1)]);
    let (_, to) = memory();
    let whole = seed_with(&from, &to, std::slice::from_ref(&one), 10 << 20, true).unwrap();
    let budget = whole.metadata_bytes + 336_000 + 261_000;
    let report = seed_with(&from, &to, std::slice::from_ref(&one), budget, false).unwrap();
    chunk(&to, 19).unwrap();
    chunk(&to, 0).unwrap();
    assert!(chunk(&to, 1).is_err() && chunk(&to, 18).is_err());
    let covered = &report.environments[0];
    assert_eq!((covered.covered_extents, covered.extents), (2, 4));
    assert_eq!((covered.covered_accesses, covered.accesses), (5, 7));
    assert!(report.metadata_bytes + report.frame_bytes <= budget);
    // Two environments: what both use comes first.
    let two = profile(&from, "two", &[(18, 4), (1, 4)]);
    let (_, other) = memory();
    let report = seed_with(
        &from,
        &other,
        &[one.clone(), two],
        whole.metadata_bytes + 265_000,
        false,
    )
    .unwrap();
    chunk(&other, 1).unwrap();
    assert_eq!(report.environments[1].covered_extents, 1);
    // Not even the metadata.
    let error = seed_with(&from, &other, &[one], 100, false).unwrap_err();
    assert!(error.to_string().contains("limit"), "{error}");
}

#[test]
fn seeding_again_adds_to_it() {
    let (_, from) = memory();
    publish_files(&from);
    let one = profile(&from, "one", &[(3, 4)]);
    let two = profile(&from, "two", &[(7, 4), (3, 1)]);
    let (_, to) = memory();
    seed_with(&from, &to, &[one], 10 << 20, false).unwrap();
    let report = seed_with(&from, &to, &[two], 10 << 20, false).unwrap();
    assert_eq!(report.transfer.layers[0].moved_frames, 1);
    assert_eq!(report.transfer.layers[0].reused_frames, 1);
    chunk(&to, 3).unwrap();
    chunk(&to, 7).unwrap();
    assert!(chunk(&to, 8).is_err());
    // Everything is used: then it is whole.
    let all: Vec<(u32, u32)> = (0..20).map(|i| (i, 1)).collect();
    let three = profile(&from, "three", &all);
    seed_with(&from, &to, &[three], 10 << 20, false).unwrap();
    let (_, manifest) = to.load(&reference("base/a:1")).unwrap();
    assert!(to.seed_marker(&manifest.map.digest).unwrap().is_none());
    assert_eq!(read_all(&to, "base/a:1").unwrap(), data_of(&files()));
}

#[test]
fn hostile_profiles_and_markers_are_refused() {
    let (_, from) = memory();
    publish_files(&from);
    let (digest, good) = profile(&from, "one", &[(3, 4)]);
    let (blobs, to) = memory();
    let mut beyond = good.clone();
    beyond.entries[0].extent = 5000;
    let mut length = good.clone();
    length.entries[0].len = 1;
    let mut other = good.clone();
    other.layers[0].layer = layerpack_store::LayerId::from_digest(Digest::of(b"x"));
    let mut unknown = good.clone();
    unknown.layers[0].manifest = Digest::of(b"y");
    for bad in [beyond, length, other, unknown] {
        assert!(seed_with(&from, &to, &[(digest, bad)], 10 << 20, false).is_err());
        assert!(to.list().unwrap().is_empty());
    }
    seed_with(&from, &to, &[(digest, good)], 10 << 20, false).unwrap();
    let (_, manifest) = to.load(&reference("base/a:1")).unwrap();
    let key = Key::seed(&manifest.map.digest);
    blobs.put(&key, b"{}", PutMode::Overwrite).unwrap();
    let verified = to.verify(&reference("base/a:1")).unwrap();
    assert!(!verified.is_ok());
    // Damaged profiles are named and do not hide others.
    let stored = from.blobs().list("profiles/").unwrap().pop().unwrap();
    from.blobs()
        .put(&stored.key, b"x", PutMode::Overwrite)
        .unwrap();
    assert!(from.profiles(None).unwrap()[0].profile.is_err());
    assert!(from.find_profile("one").is_err());
}

/// Every call of either store fails once: seeding fails with an error that names something or is
/// right, what can be read of the seed is right, and seeding again makes it whole.
#[test]
fn any_call_may_fail() {
    let (source, from) = memory();
    publish_files(&from);
    let reads = [(3, 4), (7, 2)];
    let one = [profile(&from, "one", &reads)];
    let all = files();
    let check = |to: &LayerStore, context: &str, whole: bool| {
        for (extent, _) in reads {
            match chunk(to, extent as usize) {
                Ok(bytes) => assert!(bytes == all[extent as usize], "{context}: wrong bytes"),
                Err(error) => assert!(!whole, "{context}: {error:?}"),
            }
        }
    };
    for side in ["source", "target"] {
        for fault in Fault::ALL {
            let mut failures = 0;
            for nth in 1.. {
                let context = format!("{side}: {fault:?} in call {nth}");
                let target: Arc<dyn BlobStore> = Arc::new(MemStore::new());
                let to = LayerStore::new(Arc::clone(&target));
                let inner = match side {
                    "source" => Arc::clone(&source),
                    _ => Arc::clone(&target),
                };
                let faulty = Arc::new(FaultStore::fail_nth(inner, nth, fault));
                let shaky = LayerStore::new(Arc::clone(&faulty) as Arc<dyn BlobStore>);
                let (a, b) = match side {
                    "source" => (&shaky, &to),
                    _ => (&from, &shaky),
                };
                let result = seed_with(a, b, &one, 10 << 20, false);
                if let Err(error) = &result {
                    failures += 1;
                    assert!(faulty.fired(), "{context}: {error:?}");
                    assert!(names_something(error), "{context}: {error:?}");
                }
                if to.has_reference(&reference("base/a:1")).unwrap() {
                    let verified = to.verify(&reference("base/a:1")).unwrap();
                    assert!(verified.is_ok(), "{context}: {:?}", verified.damaged);
                    check(&to, &context, result.is_ok());
                } else {
                    assert!(result.is_err(), "{context}: nothing was seeded");
                }
                seed_with(&from, &to, &one, 10 << 20, false)
                    .unwrap_or_else(|e| panic!("{context}: {e:?}"));
                check(&to, &context, true);
                if faulty.calls() < nth {
                    break;
                }
                assert!(nth < 500, "{context}: no end");
            }
            if fault == Fault::Crash {
                assert!(failures > 5, "{side}: {failures} calls");
            }
        }
    }
}

/// Whatever the limit, it is kept, everything in the store counted.
#[test]
fn the_limit_is_never_exceeded() {
    let (_, from) = memory();
    publish_files(&from);
    let all: Vec<(u32, u32)> = (0..20).map(|i| (i, 1 + i % 3)).collect();
    let one = profile(&from, "one", &all);
    let dir = tempfile::tempdir().unwrap();
    let mut seeded = 0;
    for step in 0..24_u64 {
        let limit = 20_000 + step * 97_003;
        let root = dir.path().join(step.to_string());
        let to = LayerStore::new(Arc::new(layerpack_store::FileStore::new(&root).unwrap()));
        let Ok(report) = seed_with(&from, &to, std::slice::from_ref(&one), limit, false) else {
            assert!(to.list().unwrap().is_empty());
            continue;
        };
        let mut bytes = 0;
        let mut open = vec![root];
        while let Some(path) = open.pop() {
            for entry in fs_err::read_dir(path).unwrap() {
                let entry = entry.unwrap();
                let metadata = entry.metadata().unwrap();
                match metadata.is_dir() {
                    true => open.push(entry.path()),
                    false => bytes += metadata.len(),
                }
            }
        }
        assert!(bytes <= limit, "{bytes} bytes, allowed are {limit}");
        seeded = report.frame_bytes;
        // Not much is given away either: what was left free is less than another frame needs.
        let covered = &report.environments[0];
        let room = 300_000 + 4096;
        assert!(
            covered.is_covered() || bytes + room > limit,
            "{bytes} of {limit}"
        );
    }
    assert!(seeded > 1_000_000, "{seeded}");
}
