//! Streams written, read back, damaged, and written by several at once.

use super::*;
use crate::content::Piece;

fn identity(inode: u64, size: u64) -> Identity {
    Identity::from_parts((7, inode), size, (-5, 999_999_999), (1 << 40, 1))
}

fn content(size: u64, pieces: &[(u64, u32)]) -> Content {
    Content {
        size,
        pieces: pieces
            .iter()
            .map(|&(offset, len)| Piece {
                offset,
                len,
                digest: Digest::of(&offset.to_le_bytes()),
            })
            .collect::<Vec<_>>()
            .into(),
    }
}

/// Files in the order of a build: (path, identity, content).
fn files(count: u64) -> Vec<(Vec<u8>, Identity, Content)> {
    let mut files: Vec<_> = (0..count)
        .map(|i| {
            let size = if i % 3 == 0 { 10 } else { 300_000 + i };
            let path = match i % 5 {
                0 => format!("dir-{}/sub/file-{i}", i % 7),
                1 => format!("dir-{}/file-{i}", i % 7),
                _ => format!("file-{i}"),
            };
            let content = if size == 10 {
                content(size, &[(0, 10)])
            } else {
                content(size, &[(0, 70_000), (200_000, 99_999)])
            };
            (path.into_bytes(), identity(i, size), content)
        })
        .collect();
    files.sort_by(|a, b| order((&a.0, a.1.size()), (&b.0, b.1.size())));
    files
}

fn place(directory: &Path) -> Place {
    Place::new(directory, directory, &[b"rules"]).unwrap()
}

fn keep(place: &Place, files: &[(Vec<u8>, Identity, Content)]) {
    let mut new = place.new_records().unwrap();
    for (path, identity, content) in files {
        assert!(new.add(path, identity, content));
    }
    new.keep();
}

#[test]
fn files_come_before_directories_and_small_ones_before_all() {
    let mut paths = [
        (&b"a/x"[..], 9_u64),
        (b"b", 9),
        (b"a.b/y", 9),
        (b"a/b/c", 9),
        (b"a/z", 9),
        (b"c", 9000),
        (b"a/y", 9000),
    ];
    paths.sort_by(|a, b| order(*a, *b));
    let names: Vec<&[u8]> = paths.iter().map(|(path, _)| *path).collect();
    let want: [&[u8]; 7] = [b"b", b"a/x", b"a/z", b"a/b/c", b"a.b/y", b"c", b"a/y"];
    assert_eq!(names, want);
}

#[test]
fn what_was_kept_is_found_in_order_and_changed_files_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let place = place(directory.path());
    let files = files(4000);
    keep(&place, &files);
    let mut old = place.old();
    for (i, (path, identity, content)) in files.iter().enumerate() {
        match i % 4 {
            0 => assert_eq!(old.find(path, identity).as_ref(), Some(content)),
            1 => {} // removed since
            2 => {
                let changed = Identity::from_parts(
                    identity.place(),
                    identity.size(),
                    identity.mtime(),
                    (identity.ctime().0, 2),
                );
                assert_eq!(old.find(path, &changed), None);
            }
            _ => {
                // A new file just before one that is there.
                let mut new = path.clone();
                new.pop();
                assert_eq!(old.find(&new, identity), None);
                assert_eq!(old.find(path, identity).as_ref(), Some(content));
            }
        }
    }
    // Under other rules there is another cache.
    let other = Place::new(directory.path(), directory.path(), &[b"other"]).unwrap();
    let (path, identity, _) = files.first().unwrap();
    assert_eq!(other.old().find(path, identity), None);
}

#[test]
fn damage_hides_what_follows_and_never_gives_anything_else() {
    let directory = tempfile::tempdir().unwrap();
    let place = place(directory.path());
    let files = files(3000);
    keep(&place, &files);
    let sound = fs_err::read(&place.file).unwrap();
    assert!(sound.len() > 3 * (64 << 10), "several blocks");
    for at in (0..sound.len()).step_by(sound.len() / 97) {
        for cut in [false, true] {
            let mut bytes = sound.clone();
            if cut {
                bytes.truncate(at);
            } else {
                bytes[at] ^= 0x10;
            }
            fs_err::write(&place.file, &bytes).unwrap();
            let mut old = place.old();
            let mut found = 0;
            for (path, identity, content) in &files {
                if let Some(got) = old.find(path, identity) {
                    assert_eq!(&got, content, "byte {at}");
                    found += 1;
                }
            }
            assert!(found < files.len(), "byte {at}");
        }
    }
    // The next build writes it anew.
    keep(&place, &files);
    assert_eq!(fs_err::read(&place.file).unwrap(), sound);
}

#[test]
fn a_cache_that_others_can_write_is_not_used() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let place = place(directory.path());
    let files = files(10);
    keep(&place, &files);
    let (path, identity, content) = files.first().unwrap();
    assert_eq!(place.old().find(path, identity).as_ref(), Some(content));
    fs_err::set_permissions(&place.file, std::fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(place.old().find(path, identity), None);
}

#[test]
fn builds_at_once_leave_the_whole_of_one() {
    let directory = tempfile::tempdir().unwrap();
    let place = place(directory.path());
    let files = files(500);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5 {
                    keep(&place, &files);
                    let mut old = place.old();
                    for (path, identity, content) in &files {
                        assert_eq!(old.find(path, identity).as_ref(), Some(content));
                    }
                }
            });
        }
    });
    let left: Vec<_> = fs_err::read_dir(directory.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn what_was_changed_just_now_may_change_again_unseen() {
    let read = UNIX_EPOCH + Duration::from_secs(1000);
    let file =
        |seconds, nanoseconds| Identity::from_parts((1, 1), 5, (0, 0), (seconds, nanoseconds));
    assert!(is_settled(&file(999, 899_999_999), read));
    assert!(!is_settled(&file(999, 900_000_001), read));
    assert!(
        !is_settled(&file(999, 0), read),
        "whole seconds: a coarse clock"
    );
    assert!(is_settled(&file(997, 0), read));
    assert!(!is_settled(&file(5000, 1), read), "in the future");
    assert!(is_settled(&file(-5, 1), read));
    assert!(!is_settled(&file(i64::MAX, 1), read));
}

#[test]
fn a_file_with_too_many_chunks_is_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let place = place(directory.path());
    let pieces: Vec<(u64, u32)> = (0..800_000).map(|i| (i * 10, 10)).collect();
    let mut files = files(3);
    files[1].2 = content(8_000_000, &pieces);
    keep(&place, &files);
    let mut old = place.old();
    let found: Vec<bool> = files
        .iter()
        .map(|(path, identity, _)| old.find(path, identity).is_some())
        .collect();
    assert_eq!(found, [true, false, true]);
}
