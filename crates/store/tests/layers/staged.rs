//! Several layers published together, and layers of many chunks.

use layerpack_store::{
    BlobStore, Draft, Key, PublishOutcome, StoreError, WriterOptions, publish_all,
};

use crate::support::{add, lay_out, memory, noise, options, publish, reference, text};

fn draft(name: &str, files: &[layerpack_store::FileChunks]) -> Draft {
    Draft::new(reference(name), text(7, 3000), lay_out(files))
}

#[test]
fn nothing_is_seen_of_layers_before_all_are_published() {
    let (blobs, store) = memory();
    let mut writer = store.writer(options()).unwrap();
    let files = add(&mut writer, &[noise(1, 100_000), noise(2, 5000)]).unwrap();
    let (first, mut sealed) = writer.stage(draft("base/a:1", &files)).unwrap();
    let second = sealed.stage(draft("workspace/b:1", &files[1..])).unwrap();
    assert!(store.list().unwrap().is_empty());
    assert_eq!(first.reference(), &reference("base/a:1"));
    let (until, all) = (first.stats(), second.stats());
    assert!(until.new_bytes < all.new_bytes && until.new_chunks == all.new_chunks);
    let second = second.counted_from(until);
    let manifest = store.manifest(second.digest()).unwrap();
    assert_eq!(manifest.reference(), reference("workspace/b:1"));

    let published = publish_all(vec![first, second]).unwrap();
    assert_eq!(store.list().unwrap().len(), 2);
    for one in &published {
        assert_eq!(one.outcome, PublishOutcome::Created);
        assert!(store.verify(&one.reference).unwrap().is_ok());
    }
    assert_eq!(published[1].stats.new_chunks, 0);
    assert_eq!(
        published[0].stats.new_bytes + published[1].stats.new_bytes,
        all.new_bytes + ref_len(&*blobs, "base/a:1") + ref_len(&*blobs, "workspace/b:1")
    );
    // The same again is no conflict.
    let mut writer = sealed.reopen().unwrap();
    let again = add(&mut writer, &[noise(2, 5000), noise(3, 5000)]).unwrap();
    assert_eq!(again[0], files[1]);
    let (same, mut sealed) = writer.stage(draft("workspace/b:1", &again[..1])).unwrap();
    let new = sealed.stage(draft("workspace/c:1", &again)).unwrap();
    let published = publish_all(vec![same, new]).unwrap();
    let outcomes: Vec<_> = published.iter().map(|one| one.outcome).collect();
    assert_eq!(outcomes, [PublishOutcome::Already, PublishOutcome::Created]);
    assert!(store.verify(&reference("workspace/c:1")).unwrap().is_ok());
}

/// Bytes of a reference's object.
fn ref_len(blobs: &dyn BlobStore, name: &str) -> u64 {
    blobs
        .size(&Key::reference(&reference(name)))
        .unwrap()
        .unwrap()
}

#[test]
fn a_version_that_is_taken_keeps_all_back() {
    let (_, store) = memory();
    let mut writer = store.writer(options()).unwrap();
    let files = add(&mut writer, &[noise(1, 100_000), noise(2, 5000)]).unwrap();
    let (first, mut sealed) = writer.stage(draft("base/a:1", &files)).unwrap();
    let second = sealed.stage(draft("workspace/b:1", &files[1..])).unwrap();
    // Another builder takes the second name meanwhile.
    publish(&store, "workspace/b:1", &[noise(9, 100)]).unwrap();
    let error = publish_all(vec![first, second]).unwrap_err();
    assert!(matches!(error, StoreError::Conflict { .. }), "{error}");
    let names: Vec<String> = (store.list().unwrap().iter())
        .map(|(name, _)| name.to_string())
        .collect();
    assert_eq!(names, ["workspace/b:1"]);
    // Whoever comes later is told before anything is written.
    let error = sealed.stage(draft("workspace/b:1", &files[1..]));
    assert!(matches!(error, Err(StoreError::Conflict { .. })));
}

/// What is kept of chunks in a file changes nothing.
#[test]
fn a_layer_of_many_chunks_is_the_same_with_a_temporary_file() {
    let dir = tempfile::tempdir().unwrap();
    let scratch = dir.path().join("scratch");
    let mut digests = Vec::new();
    for scratch in [None, Some(scratch.clone())] {
        let (_, store) = memory();
        let options = WriterOptions {
            scratch,
            ..options()
        };
        let mut files = Vec::new();
        let mut writer = store.writer(options).unwrap();
        for i in 0..60_000_u32 {
            // Some of them twice.
            let bytes = (i / 2 * 2 + i % 7 % 2).to_le_bytes();
            files.extend(add(&mut writer, &[bytes.to_vec()]).unwrap());
        }
        writer.close().unwrap();
        assert!(writer.add_chunk(b"late").is_err());
        let published = writer.finish(draft("base/many:1", &files)).unwrap();
        assert!(store.verify(&published.reference).unwrap().is_ok());
        digests.push((published.digest, published.stats.new_chunks));
    }
    assert_eq!(digests[0], digests[1]);
    assert_eq!(fs_err::read_dir(&scratch).unwrap().count(), 0);
}
