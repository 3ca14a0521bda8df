//! Publishing: identity, deduplication, conflicts, healing.

use std::sync::Arc;

use layerpack_store::{
    BlobStore, Digest, Draft, Extent, FileChunks, FileStore, Key, LayerStore, MapBuilder, MemStore,
    PublishOutcome, PutMode, StoreError, WriterOptions,
};

use crate::support::{
    data_of, lay_out, memory, noise, options, publish, publish_with, read_all, reference, sample,
    text,
};

#[test]
fn round_trip_in_memory_and_in_files() {
    let dir = tempfile::tempdir().unwrap();
    let stores: [Arc<dyn BlobStore>; 2] = [
        Arc::new(MemStore::new()),
        Arc::new(FileStore::new(dir.path().join("store")).unwrap()),
    ];
    let mut digests = Vec::new();
    for blobs in stores {
        let store = LayerStore::new(blobs);
        let files = sample(1);
        let published = publish(&store, "base/x:1", &files).unwrap();
        assert_eq!(published.outcome, PublishOutcome::Created);
        assert_eq!(
            store.list().unwrap(),
            [(reference("base/x:1"), published.digest)]
        );
        assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&files));
        let report = store.verify(&reference("base/x:1")).unwrap();
        assert!(report.is_ok(), "{:?}", report.damaged);
        assert_eq!(report.layer_id, Some(published.layer_id));
        assert!(store.verify_index().unwrap().is_empty());
        digests.push(published.digest);
    }
    assert_eq!(digests[0], digests[1]);
}

#[test]
fn identity_does_not_depend_on_jobs_level_or_store_state() {
    let files = sample(1);
    let mut digests = Vec::new();
    for (jobs, level, before) in [(1, 1, 0), (2, 3, 0), (5, 19, 0), (3, 3, 1), (2, -5, 2)] {
        let (_, store) = memory();
        for i in 0..before {
            publish(&store, &format!("base/other{i}:1"), &sample(i)).unwrap();
        }
        let options = WriterOptions {
            jobs,
            level,
            ..WriterOptions::default()
        };
        let published = publish_with(&store, "base/x:1", &files, options).unwrap();
        digests.push((published.digest, published.layer_id));
        assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&files));
    }
    digests.dedup();
    assert_eq!(digests.len(), 1);
}

/// Threads must not decide what is in a pack: equal runs on empty stores leave equal objects.
#[test]
fn packs_do_not_depend_on_threads() {
    let files: Vec<_> = (0..40).map(|i| text(i, 90_000)).collect();
    let objects = |jobs| {
        let (blobs, store) = memory();
        publish_with(
            &store,
            "base/x:1",
            &files,
            WriterOptions {
                jobs,
                level: 3,
                ..WriterOptions::default()
            },
        )
        .unwrap();
        let objects = blobs.list("").unwrap().into_iter();
        objects
            .map(|object| (object.key, object.size))
            .collect::<Vec<_>>()
    };
    let one = objects(1);
    assert_eq!(one, objects(4));
    assert_eq!(one, objects(0));
}

#[test]
fn the_same_content_writes_no_packs() {
    let (blobs, store) = memory();
    let files = sample(1);
    let first = publish(&store, "base/x:1", &files).unwrap();
    let objects = blobs.list("").unwrap();
    let again = publish(&store, "base/x:1", &files).unwrap();
    assert_eq!(again.outcome, PublishOutcome::Already);
    assert_eq!(
        (again.digest, again.stats.new_packs, again.stats.new_bytes),
        (first.digest, 0, 0)
    );
    assert_eq!(blobs.list("").unwrap(), objects);

    let renamed = publish(&store, "toolkit/y:1", &files).unwrap();
    assert_eq!(
        (renamed.layer_id, renamed.stats.new_packs),
        (first.layer_id, 0)
    );
    assert_ne!(renamed.digest, first.digest);
}

#[test]
fn only_new_chunks_are_written() {
    let (_, store) = memory();
    let mut files = sample(1);
    publish(&store, "base/x:1", &files).unwrap();
    let last = files.len() - 2;
    files[last].splice(100_000..100_000, *b"inserted");
    let changed = publish(&store, "base/x:2", &files).unwrap();
    assert_eq!(changed.stats.new_packs, 1);
    assert!(changed.stats.new_raw_bytes < 600_000, "{:?}", changed.stats);
    assert!(changed.stats.reused_chunks > 6, "{:?}", changed.stats);
    assert_eq!(read_all(&store, "base/x:2").unwrap(), data_of(&files));
}

#[test]
fn a_version_never_changes() {
    let (blobs, store) = memory();
    let first = publish(&store, "base/x:1", &sample(1)).unwrap();
    let before = blobs
        .get(&Key::reference(&reference("base/x:1")), 1000)
        .unwrap();
    match publish(&store, "base/x:1", &sample(2)) {
        Err(StoreError::Conflict {
            reference: r,
            existing,
            new,
            ..
        }) => {
            assert_eq!((*r, existing), (reference("base/x:1"), first.digest));
            assert_ne!(new, first.digest);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(
        blobs
            .get(&Key::reference(&reference("base/x:1")), 1000)
            .unwrap(),
        before
    );
    assert_eq!(read_all(&store, "base/x:1").unwrap(), data_of(&sample(1)));
}

#[test]
fn removing_forgets_the_name_only() {
    let (_, store) = memory();
    let first = publish(&store, "base/x:1", &sample(1)).unwrap();
    store.remove(&reference("base/x:1")).unwrap();
    for error in [
        store.resolve(&reference("base/x:1")).unwrap_err(),
        store.remove(&reference("base/x:1")).unwrap_err(),
        store.verify(&reference("base/x:1")).unwrap_err(),
    ] {
        assert!(
            matches!(error, StoreError::UnknownReference { .. }),
            "{error:?}"
        );
        assert!(error.to_string().contains("base/x:1"));
    }
    assert!(store.list().unwrap().is_empty());
    let again = publish(&store, "base/x:1", &sample(1)).unwrap();
    assert_eq!(
        (again.digest, again.outcome, again.stats.new_packs),
        (first.digest, PublishOutcome::Created, 0)
    );
}

/// A layer made of chunks that other layers brought: nothing is added, nothing is copied.
#[test]
fn a_map_may_use_what_the_store_has() {
    let (_, store) = memory();
    let files = vec![noise(1, 1000), noise(2, 2000)];
    publish(&store, "base/x:1", &files).unwrap();
    let mut builder = MapBuilder::new(8192);
    builder.push(Extent {
        data_offset: 0,
        len: 2000,
        digest: Digest::of(&files[1]),
    });
    builder.push(Extent {
        data_offset: 4096,
        len: 2000,
        digest: Digest::of(&files[1]),
    });
    let draft = Draft::new(
        reference("diff/y:1"),
        text(7, 3000),
        builder.build().unwrap(),
    );
    let published = store
        .writer(WriterOptions::default())
        .unwrap()
        .finish(draft)
        .unwrap();
    assert_eq!(published.stats.new_packs, 0);
    assert_eq!(
        read_all(&store, "diff/y:1").unwrap(),
        data_of(&[files[1].clone(), files[1].clone()])
    );
}

#[test]
fn an_unknown_chunk_is_refused_and_nothing_is_published() {
    let (_, store) = memory();
    let mut builder = MapBuilder::new(4096);
    builder.push(Extent {
        data_offset: 0,
        len: 5,
        digest: Digest::of(b"never"),
    });
    let draft = Draft::new(reference("diff/y:1"), Vec::new(), builder.build().unwrap());
    let error = store
        .writer(WriterOptions::default())
        .unwrap()
        .finish(draft)
        .unwrap_err();
    assert!(
        matches!(error, StoreError::InvalidInput { .. }),
        "{error:?}"
    );
    assert!(error.to_string().contains("diff/y:1"), "{error}");
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn layers_without_data_are_layers() {
    let (_, store) = memory();
    publish(&store, "base/empty:1", &[]).unwrap();
    assert_eq!(read_all(&store, "base/empty:1").unwrap(), Vec::<u8>::new());
    assert!(store.verify(&reference("base/empty:1")).unwrap().is_ok());
}

/// More packs than one, frames of many small chunks, and more frames than may be in flight.
#[test]
fn many_packs() {
    let (blobs, store) = memory();
    let mut files: Vec<Vec<u8>> = (0..3000)
        .map(|i| noise(i, 100 + (i as usize % 700)))
        .collect();
    files.push(noise(9999, 140 << 20));
    let published = publish_with(
        &store,
        "base/big:1",
        &files,
        WriterOptions {
            level: 1,
            ..WriterOptions::default()
        },
    )
    .unwrap();
    assert_eq!(published.stats.new_packs, 3);
    assert_eq!(blobs.list("packs/").unwrap().len(), 3);
    assert!(
        read_all(&store, "base/big:1").unwrap() == data_of(&files),
        "other bytes"
    );
}

#[test]
fn a_dropped_writer_leaves_nothing_visible() {
    let (blobs, store) = memory();
    let mut writer = store.writer(WriterOptions::default()).unwrap();
    writer.add_chunk(&noise(1, 500_000)).unwrap();
    drop(writer);
    assert!(blobs.list("refs/").unwrap().is_empty() && blobs.list("index/").unwrap().is_empty());
}

#[test]
fn bad_options_and_chunks_are_refused() {
    let (_, store) = memory();
    for options in [
        WriterOptions {
            level: 23,
            ..WriterOptions::default()
        },
        WriterOptions {
            level: -8,
            ..WriterOptions::default()
        },
        WriterOptions {
            jobs: 257,
            ..WriterOptions::default()
        },
    ] {
        assert!(matches!(
            store.writer(options),
            Err(StoreError::InvalidInput { .. })
        ));
    }
    let mut writer = store.writer(WriterOptions::default()).unwrap();
    assert!(matches!(
        writer.add_chunk(b""),
        Err(StoreError::InvalidInput { .. })
    ));
    assert!(matches!(
        writer.add_chunk(&vec![1; (1 << 20) + 1]),
        Err(StoreError::InvalidInput { .. })
    ));
    assert!(writer.add_chunk(&vec![1; 1 << 20]).is_ok());
}

/// An input that fails in the middle is the input's error, and the writer remains usable.
#[test]
fn a_failing_input_is_named_as_such() {
    struct Failing(u32);
    impl std::io::Read for Failing {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0 += 1;
            match self.0 {
                1 => Err(std::io::ErrorKind::Interrupted.into()),
                2..5 => Ok(buffer.len().min(60_000)),
                _ => Err(std::io::Error::other("gone")),
            }
        }
    }
    let (_, store) = memory();
    let mut writer = store.writer(WriterOptions::default()).unwrap();
    assert!(matches!(
        writer.add_file(&mut Failing(0), 0),
        Err(StoreError::Input(_))
    ));
    let file = writer.add_file(&mut &b"fine"[..], 4).unwrap();
    writer
        .finish(Draft::new(
            reference("base/x:1"),
            text(7, 3000),
            lay_out(&[file]),
        ))
        .unwrap();
    assert_eq!(
        read_all(&store, "base/x:1").unwrap(),
        data_of(&[b"fine".to_vec()])
    );
}

/// Reads in small pieces must cut as one large read does.
#[test]
fn cuts_do_not_depend_on_how_input_arrives() {
    struct Pieces<'a>(&'a [u8], usize);
    impl std::io::Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.1 = self.1 * 7 % 10_007 + 1;
            let n = self.0.len().min(buffer.len()).min(self.1);
            buffer[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }
    let (_, store) = memory();
    let mut writer = store.writer(WriterOptions::default()).unwrap();
    for len in [65_536, 65_537, 262_144, 1_048_576, 1_048_577, 3_000_000] {
        let data = text(len as u64, len);
        let whole = writer.add_file(&mut data.as_slice(), 0).unwrap();
        assert_eq!(
            whole,
            writer.add_file(&mut Pieces(&data, 3), u64::MAX).unwrap()
        );
        assert_eq!(whole.size, len as u64);
        assert!(
            len == 65_536 || len == 65_537 || whole.chunks.len() > 1,
            "{len}"
        );
    }
}

#[test]
fn publishing_again_heals() {
    let files = sample(1);
    for kind in [
        "meta/",
        "maps/",
        "locators/",
        "manifests/",
        "packs/",
        "index/",
    ] {
        for delete in [true, false] {
            let (blobs, store) = memory();
            let first = publish(&store, "base/x:1", &files).unwrap();
            let victim = blobs.list(kind).unwrap().remove(0).key;
            if delete {
                blobs.delete(&victim).unwrap();
            } else {
                let mut bytes = blobs.get(&victim, u64::MAX).unwrap().unwrap();
                bytes.truncate(bytes.len() - 40);
                blobs.put(&victim, &bytes, PutMode::Overwrite).unwrap();
            }
            let again = publish(&store, "base/x:1", &files).unwrap();
            assert_eq!(again.digest, first.digest);
            assert_eq!(
                read_all(&store, "base/x:1").unwrap(),
                data_of(&files),
                "{kind} deleted: {delete}"
            );
            let report = store.verify(&reference("base/x:1")).unwrap();
            assert!(
                report.is_ok(),
                "{kind} deleted: {delete}: {:?}",
                report.damaged
            );
            if !delete {
                assert!(!again.warnings.is_empty(), "{kind}: nothing was said");
            }
        }
    }
}

#[test]
fn a_newer_store_is_refused() {
    for marker in [
        &br#"{"format":2,"incompat":[]}"#[..],
        br#"{"format":1,"incompat":["x"]}"#,
    ] {
        let (blobs, store) = memory();
        publish(&store, "base/x:1", &sample(1)).unwrap();
        blobs
            .put(&Key::marker(), marker, PutMode::Overwrite)
            .unwrap();
        let store = LayerStore::new(blobs);
        for error in [
            store.load(&reference("base/x:1")).unwrap_err(),
            store.list().unwrap_err(),
            store.remove(&reference("base/x:1")).unwrap_err(),
            store.writer(WriterOptions::default()).unwrap_err(),
        ] {
            assert!(matches!(error, StoreError::Unsupported { .. }), "{error:?}");
            assert!(error.to_string().contains("layerpack.json"));
        }
    }
}

#[test]
fn a_damaged_reference_does_not_hide_others() {
    let (blobs, store) = memory();
    for name in ["base/a:1", "base/b:1", "diff/a/b:1"] {
        publish(&store, name, &sample(1)).unwrap();
    }
    blobs
        .put(
            &Key::reference(&reference("base/b:1")),
            b"nonsense",
            PutMode::Overwrite,
        )
        .unwrap();
    let entries = store.entries().unwrap();
    assert_eq!(
        entries
            .iter()
            .map(|e| e.manifest.is_ok())
            .collect::<Vec<_>>(),
        [true, false, true]
    );
    assert!(
        store
            .list()
            .unwrap_err()
            .to_string()
            .contains("refs/base/b/_1")
    );
}

/// A writer does not keep the digests of all its chunks for one index at its end: finished packs are
/// indexed as soon as they have many.
#[test]
fn many_chunks_are_indexed_as_they_come() {
    const CHUNKS: u32 = (128 << 10) + 100;
    let (blobs, store) = memory();
    let mut writer = store.writer(options()).unwrap();
    let files: Vec<FileChunks> = (0..CHUNKS)
        .map(|i| FileChunks {
            chunks: vec![(writer.add_chunk(&i.to_le_bytes()).unwrap(), 4)],
            size: 4,
        })
        .collect();
    let map = lay_out(&files);
    let draft = Draft::new(reference("base/many:1"), text(7, 3000), map);
    let published = writer.finish(draft).unwrap();
    assert_eq!(published.stats.new_chunks, u64::from(CHUNKS));
    assert_eq!(published.stats.new_packs, 3);
    assert_eq!(blobs.list("index/").unwrap().len(), 3);
    let report = store.verify(&reference("base/many:1")).unwrap();
    assert!(report.is_ok(), "{report:?}");
    // Another layer of the same chunks writes no pack.
    let mut writer = store.writer(options()).unwrap();
    let draft = Draft::new(reference("base/again:1"), text(7, 3000), lay_out(&files));
    for i in 0..CHUNKS {
        writer.add_chunk(&i.to_le_bytes()).unwrap();
    }
    let published = writer.finish(draft).unwrap();
    assert_eq!(
        (published.stats.new_chunks, published.stats.new_packs),
        (0, 0)
    );
}
