//! What every backend and wrapper must do, as one suite: [`run`] it on a fresh, empty store. It
//! answers with what is wrong rather than panicking, so that it can also probe a store in use by
//! a bucket's or directory's owner.

use std::sync::Arc;

use super::{BlobStore, PutMode, PutOutcome};
use crate::error::StoreError;
use crate::key::Key;

type Check = std::result::Result<(), String>;

/// Checks the whole contract. `open` gives a new handle on the same, at first empty store; several
/// are used at once.
///
/// # Errors
/// The first rule that does not hold, with what was seen.
pub fn run(open: &dyn Fn() -> Arc<dyn BlobStore>) -> Check {
    empty(&*open())?;
    put_and_get(&*open())?;
    modes(&*open())?;
    ranges(&*open())?;
    streams(&*open())?;
    lists(&*open())?;
    deletes(&*open())?;
    handles(&*open(), &*open())?;
    races(open)
}

fn key(text: &str) -> Result<Key, String> {
    Key::new(text).map_err(|e| e.to_string())
}

fn ok<T>(what: &str, result: crate::error::Result<T>) -> Result<T, String> {
    result.map_err(|e| format!("{what}: {e}"))
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, seen: &T, wanted: &T) -> Check {
    if seen == wanted {
        Ok(())
    } else {
        Err(format!("{what}: {seen:?}, not {wanted:?}"))
    }
}

fn empty(store: &dyn BlobStore) -> Check {
    let none = key("manifests/none")?;
    same(
        "list of an empty store",
        &ok("list", store.list(""))?,
        &Vec::new(),
    )?;
    same("get of no object", &ok("get", store.get(&none, 10))?, &None)?;
    same("size of no object", &ok("size", store.size(&none))?, &None)?;
    same(
        "delete of no object",
        &ok("delete", store.delete(&none))?,
        &false,
    )?;
    match store.get_range(&none, 0..0) {
        Err(StoreError::Missing { key, .. }) if key == none.as_str() => Ok(()),
        other => Err(format!(
            "get_range of no object: {other:?}, not Missing naming it"
        )),
    }
}

fn put_and_get(store: &dyn BlobStore) -> Check {
    let large: Vec<u8> = (0..3_000_000_u32)
        .flat_map(u32::to_le_bytes)
        .take(5_000_001)
        .collect();
    for (name, bytes) in [
        ("a/empty", &[][..]),
        ("a/one", b"1"),
        ("deep/er/and/deep.er_/x-1", b"deep"),
        ("a/large", &large),
    ] {
        let k = key(name)?;
        same(
            "put",
            &ok("put", store.put(&k, bytes, PutMode::IfAbsent))?,
            &PutOutcome::Created,
        )?;
        let got = ok("get", store.get(&k, bytes.len() as u64))?;
        same(
            &format!("size of {name}"),
            &ok("size", store.size(&k))?,
            &Some(bytes.len() as u64),
        )?;
        if got.as_deref() != Some(bytes) {
            return Err(format!("get of {name}: other bytes than were put"));
        }
    }
    match store.get(&key("a/large")?, 5_000_000) {
        Err(StoreError::TooLarge {
            size: 5_000_001,
            limit: 5_000_000,
            ..
        }) => Ok(()),
        other => Err(format!(
            "get beyond max_len: {:?}, not TooLarge",
            other.map(|b| b.map(|b| b.len()))
        )),
    }
}

fn modes(store: &dyn BlobStore) -> Check {
    let k = key("modes/x")?;
    same(
        "first",
        &ok("put", store.put(&k, b"first", PutMode::IfAbsent))?,
        &PutOutcome::Created,
    )?;
    same(
        "second",
        &ok("put", store.put(&k, b"second", PutMode::IfAbsent))?,
        &PutOutcome::Exists,
    )?;
    same(
        "IfAbsent keeps",
        &ok("get", store.get(&k, 100))?,
        &Some(b"first".to_vec()),
    )?;
    same(
        "overwrite",
        &ok("put", store.put(&k, b"third", PutMode::Overwrite))?,
        &PutOutcome::Created,
    )?;
    same(
        "Overwrite replaces",
        &ok("get", store.get(&k, 100))?,
        &Some(b"third".to_vec()),
    )?;
    let new = key("modes/new")?;
    same(
        "overwrite nothing",
        &ok("put", store.put(&new, b"n", PutMode::Overwrite))?,
        &PutOutcome::Created,
    )
}

fn ranges(store: &dyn BlobStore) -> Check {
    let k = key("ranges/x")?;
    ok("put", store.put(&k, b"0123456789", PutMode::IfAbsent))?;
    for (range, wanted) in [
        (0..10, &b"0123456789"[..]),
        (3..4, b"3"),
        (9..10, b"9"),
        (4..4, b""),
        (10..10, b""),
    ] {
        let got = ok("get_range", store.get_range(&k, range.clone()))?;
        same(&format!("range {range:?}"), &got, &wanted.to_vec())?;
    }
    for range in [0..11, 9..11, 11..12, u64::MAX - 1..u64::MAX, 0..u64::MAX] {
        match store.get_range(&k, range.clone()) {
            Err(StoreError::Corrupt {
                key,
                range: Some(seen),
                ..
            }) if key == k.as_str() && seen == range => {}
            other => {
                return Err(format!(
                    "range {range:?} beyond the end: {other:?}, not Corrupt naming it"
                ));
            }
        }
    }
    Ok(())
}

fn streams(store: &dyn BlobStore) -> Check {
    let k = key("streams/x")?;
    let before = ok("list", store.list(""))?;
    let mut dropped = ok("put_stream", store.put_stream())?;
    ok("write", dropped.write(b"never seen"))?;
    same("unfinished object", &ok("list", store.list(""))?, &before)?;
    drop(dropped);
    same("dropped object", &ok("list", store.list(""))?, &before)?;

    let mut first = ok("put_stream", store.put_stream())?;
    let mut second = ok("put_stream", store.put_stream())?;
    for piece in [&b"one"[..], b"", b" two"] {
        ok("write", first.write(piece))?;
        ok("write", second.write(b"other"))?;
    }
    same(
        "commit",
        &ok("commit", first.commit(&k, PutMode::IfAbsent))?,
        &PutOutcome::Created,
    )?;
    same(
        "second commit",
        &ok("commit", second.commit(&k, PutMode::IfAbsent))?,
        &PutOutcome::Exists,
    )?;
    same(
        "first wins",
        &ok("get", store.get(&k, 100))?,
        &Some(b"one two".to_vec()),
    )?;

    let mut third = ok("put_stream", store.put_stream())?;
    ok("write", third.write(b"three"))?;
    same(
        "overwriting commit",
        &ok("commit", third.commit(&k, PutMode::Overwrite))?,
        &PutOutcome::Created,
    )?;
    same(
        "it overwrote",
        &ok("get", store.get(&k, 100))?,
        &Some(b"three".to_vec()),
    )?;
    let nothing = ok("put_stream", store.put_stream())?;
    ok(
        "commit",
        nothing.commit(&key("streams/empty")?, PutMode::IfAbsent),
    )?;
    same(
        "empty stream",
        &ok("get", store.get(&key("streams/empty")?, 0))?,
        &Some(Vec::new()),
    )
}

fn lists(store: &dyn BlobStore) -> Check {
    for name in [
        "lists/b/2",
        "lists/a",
        "lists/b/10",
        "lists/bb",
        "lists/c/d/e",
    ] {
        ok(
            "put",
            store.put(&key(name)?, name.as_bytes(), PutMode::IfAbsent),
        )?;
    }
    let info = |name: &str| Ok::<_, String>((key(name)?, name.len() as u64));
    for (prefix, wanted) in [
        (
            "lists/",
            &[
                "lists/a",
                "lists/b/10",
                "lists/b/2",
                "lists/bb",
                "lists/c/d/e",
            ][..],
        ),
        ("lists/b", &["lists/b/10", "lists/b/2", "lists/bb"]),
        ("lists/b/", &["lists/b/10", "lists/b/2"]),
        ("lists/b/1", &["lists/b/10"]),
        ("lists/c/d/e", &["lists/c/d/e"]),
        ("lists/none", &[]),
        ("lists/a/", &[]),
        ("../", &[]),
        ("lists/../", &[]),
    ] {
        let wanted = wanted
            .iter()
            .map(|n| info(n))
            .collect::<Result<Vec<_>, _>>()?;
        let seen: Vec<_> = ok("list", store.list(prefix))?
            .into_iter()
            .map(|object| (object.key, object.size))
            .collect();
        same(&format!("list of {prefix:?}"), &seen, &wanted)?;
    }
    let all = ok("list", store.list(""))?;
    if !all.is_sorted() || all.len() < 5 {
        return Err(format!(
            "list of everything is not sorted or not complete: {all:?}"
        ));
    }
    same(
        "get of a prefix",
        &ok("get", store.get(&key("lists/b")?, 100))?,
        &None,
    )?;
    same(
        "size of a prefix",
        &ok("size", store.size(&key("lists/b")?))?,
        &None,
    )?;
    same(
        "delete of a prefix",
        &ok("delete", store.delete(&key("lists/b")?))?,
        &false,
    )
}

fn deletes(store: &dyn BlobStore) -> Check {
    let k = key("deletes/x")?;
    ok("put", store.put(&k, b"x", PutMode::IfAbsent))?;
    same("delete", &ok("delete", store.delete(&k))?, &true)?;
    same("delete again", &ok("delete", store.delete(&k))?, &false)?;
    same("get after delete", &ok("get", store.get(&k, 10))?, &None)?;
    same(
        "list after delete",
        &ok("list", store.list("deletes/"))?,
        &Vec::new(),
    )?;
    same(
        "put after delete",
        &ok("put", store.put(&k, b"y", PutMode::IfAbsent))?,
        &PutOutcome::Created,
    )
}

fn handles(one: &dyn BlobStore, other: &dyn BlobStore) -> Check {
    let k = key("handles/x")?;
    ok("put", one.put(&k, b"seen", PutMode::IfAbsent))?;
    same(
        "another handle sees it",
        &ok("get", other.get(&k, 10))?,
        &Some(b"seen".to_vec()),
    )?;
    same("both have one address", &one.url(), &other.url())
}

/// Of writers at once one wins, where the store decides that; everyone then sees one writer's
/// bytes, whole.
fn races(open: &dyn Fn() -> Arc<dyn BlobStore>) -> Check {
    const WRITERS: u8 = 4;
    for round in 0..8 {
        let k = key(&format!("races/{round}"))?;
        let stores: Vec<_> = (0..WRITERS).map(|_| open()).collect();
        let results: Vec<Result<bool, String>> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..WRITERS)
                .zip(&stores)
                .map(|(i, store)| {
                    let k = &k;
                    scope.spawn(move || {
                        let bytes = vec![i; 100_000];
                        let outcome = ok("put", store.put(k, &bytes, PutMode::IfAbsent))?;
                        let seen = ok("get", store.get(k, 100_000))?.unwrap_or_default();
                        let first = seen.first().copied().unwrap_or(WRITERS);
                        if seen.len() != 100_000 || seen.iter().any(|&b| b != first) {
                            return Err(
                                "a reader saw a mixture or a part of what was put".to_owned()
                            );
                        }
                        let won = outcome == PutOutcome::Created;
                        // Where races are not decided, several may be told that they won, and
                        // what a winner reads may be another's already.
                        if won == (first == i) || !store.decides_races() {
                            Ok(won)
                        } else {
                            Err("a writer was told wrongly whether it won".to_owned())
                        }
                    })
                })
                .collect();
            writers
                .into_iter()
                .map(|w| {
                    w.join()
                        .unwrap_or_else(|_| Err("a writer panicked".to_owned()))
                })
                .collect()
        });
        let winners = results
            .into_iter()
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .filter(|won| *won)
            .count();
        if winners == 0 || (winners > 1 && open().decides_races()) {
            return Err(format!("{winners} writers won a race"));
        }
    }
    Ok(())
}
