//! Publishing a reference where `IfAbsent` does not decide between writers at once (FORMAT.md,
//! "Claims").
//!
//! Reading and writing single objects cannot settle a race in one step, but it can make sure that
//! never two writers win. Each puts a claim that names its manifest, then lists the claims, then
//! looks for the reference. Of two writers, the one that listed later sees the other's claim, or,
//! if that is gone again, the other's reference. So whoever sees neither is alone and writes.
//! Writers that see each other do not write: the one whose claim sorts first waits for the others
//! to withdraw. No clock takes part in that. One only decides when a claim is of a dead writer.

use std::time::{Duration, Instant, SystemTime};

use super::LayerStore;
use crate::blob::{ObjectInfo, PutMode, PutOutcome};
use crate::digest::Digest;
use crate::error::{Result, StoreError};
use crate::key::Key;
use crate::reference::Reference;

/// Age, by the store's clock, at which a claim is taken for one of a dead writer.
const STALE: Duration = Duration::from_secs(20 * 60);
/// A claim this old is put anew before it is relied on: far below [`STALE`], since writing the
/// reference may take a while too.
const FRESH: Duration = Duration::from_secs(5 * 60);
/// How long a writer waits for others.
const PATIENCE: Duration = Duration::from_secs(120);
const FIRST_WAIT: Duration = Duration::from_millis(20);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// What a look at the claims says.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// Nobody else wants another manifest: write.
    Alone,
    /// Ours is gone: someone took us for dead.
    Lost,
    /// These are of dead writers: remove them and look again.
    Dead(Vec<Key>),
    /// Others are there, ours sorts first.
    First,
    /// Others are there, one sorts before ours.
    Behind,
}

/// Judges the claims on one reference from the place of `own`, which is for `manifest`.
fn judge(claims: &[ObjectInfo], own: &Key, manifest: &Digest) -> Verdict {
    let Some(mine) = claims.iter().find(|claim| &claim.key == own) else {
        return Verdict::Lost;
    };
    let rivals: Vec<&ObjectInfo> = claims
        .iter()
        .filter(|claim| manifest_of(&claim.key).as_ref() != Some(manifest))
        .collect();
    // Both times are the store's: no clock of ours is compared with it.
    let is_dead = |claim: &ObjectInfo| {
        let age = |now: SystemTime, then: SystemTime| now.duration_since(then).ok();
        mine.modified
            .zip(claim.modified)
            .and_then(|(now, then)| age(now, then))
            .is_some_and(|age| age > STALE)
    };
    let dead: Vec<Key> = rivals
        .iter()
        .filter(|claim| is_dead(claim))
        .map(|claim| claim.key.clone())
        .collect();
    if !dead.is_empty() {
        return Verdict::Dead(dead);
    }
    match rivals.iter().map(|claim| &claim.key).min() {
        None => Verdict::Alone,
        Some(first) if own < first => Verdict::First,
        Some(_) => Verdict::Behind,
    }
}

/// The manifest that a claim is for; `None` for what is no claim, which then counts as a rival.
fn manifest_of(claim: &Key) -> Option<Digest> {
    let (_, last) = claim.as_str().rsplit_once('/')?;
    Digest::from_hex(last.split('-').next()?).ok()
}

impl LayerStore {
    /// Creates the object of a reference, unless there is one. Of writers at once that bring
    /// different manifests one creates it, whatever the backend promises.
    pub(super) fn create_reference(
        &self,
        reference: &Reference,
        manifest: &Digest,
        object: &[u8],
    ) -> Result<PutOutcome> {
        let target = Key::reference(reference);
        if self.blobs().decides_races() {
            return self.blobs().put(&target, object, PutMode::IfAbsent);
        }
        let own = Key::claim(reference, manifest, fastrand::u64(..));
        let outcome = self.create_claimed(reference, manifest, &own, &target, object);
        // Whatever came of it. What stays is broken by others once it is stale.
        if let Err(error) = self.blobs().delete_volatile(&own) {
            tracing::debug!("a claim stays: {error}");
        }
        outcome
    }

    fn create_claimed(
        &self,
        reference: &Reference,
        manifest: &Digest,
        own: &Key,
        target: &Key,
        object: &[u8],
    ) -> Result<PutOutcome> {
        let begun = Instant::now();
        let mut wait = FIRST_WAIT;
        let mut claimed: Option<Instant> = None;
        while begun.elapsed() < PATIENCE {
            // Before the claim is written, so that it is never thought younger than it is.
            let since = match claimed {
                Some(since) if since.elapsed() < FRESH => since,
                _ => {
                    let since = Instant::now();
                    self.blobs().put(own, b"", PutMode::Overwrite)?;
                    claimed = Some(since);
                    since
                }
            };
            let claims = self.blobs().list(&Key::claims(reference))?;
            // After the list: a writer's claim goes only when its reference is there.
            if self.blobs().size(target)?.is_some() {
                return Ok(PutOutcome::Exists);
            }
            match judge(&claims, own, manifest) {
                Verdict::Alone if since.elapsed() < FRESH => {
                    return self.blobs().put(target, object, PutMode::IfAbsent);
                }
                Verdict::Alone => continue,
                Verdict::Lost => {
                    claimed = None;
                    continue;
                }
                Verdict::Dead(dead) => {
                    for key in dead {
                        tracing::debug!(%key, "removed the claim of a dead writer");
                        self.blobs().delete(&key)?;
                    }
                    continue;
                }
                Verdict::First => {}
                Verdict::Behind => {
                    self.blobs().delete(own)?;
                    claimed = None;
                }
            }
            std::thread::sleep(wait.mul_f64(0.5 + fastrand::f64()));
            wait = (wait * 2).min(LONGEST_WAIT);
        }
        Err(StoreError::Io {
            operation: "publish",
            store: self.url().to_owned(),
            key: target.to_string(),
            source: std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                "another writer is publishing this version and does not end; run again in a while",
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference() -> Reference {
        "base/x:1".parse().unwrap()
    }

    fn claim(content: &[u8], writer: u64, age_secs: u64) -> ObjectInfo {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        ObjectInfo {
            key: Key::claim(&reference(), &Digest::of(content), writer),
            size: 0,
            modified: Some(now - Duration::from_secs(age_secs)),
        }
    }

    #[test]
    fn claims_are_judged() {
        let (a, b) = (Digest::of(b"a"), Digest::of(b"b"));
        let mine = claim(b"a", 1, 0);
        let judge = |claims: &[ObjectInfo]| judge(claims, &mine.key, &a);
        assert_eq!(judge(&[]), Verdict::Lost);
        assert_eq!(judge(&[claim(b"b", 2, 0)]), Verdict::Lost);
        assert_eq!(judge(std::slice::from_ref(&mine)), Verdict::Alone);
        // Others that bring the same are no rivals, however old.
        assert_eq!(
            judge(&[mine.clone(), claim(b"a", 2, 0), claim(b"a", 3, 9999)]),
            Verdict::Alone
        );
        let rival = claim(b"b", 2, 60);
        let expected = if mine.key < rival.key {
            Verdict::First
        } else {
            Verdict::Behind
        };
        assert_eq!(judge(&[mine.clone(), rival.clone()]), expected);
        let other = super::judge(&[mine.clone(), rival.clone()], &rival.key, &b);
        assert_ne!(
            other, expected,
            "the two of them do not wait for each other"
        );
        let dead = claim(b"b", 3, STALE.as_secs() + 1);
        assert_eq!(
            judge(&[mine.clone(), dead.clone(), rival]),
            Verdict::Dead(vec![dead.key])
        );
        // What nobody can read is not thrown away, but not passed over either.
        let odd = ObjectInfo {
            key: Key::new(&format!("{}zz", Key::claims(&reference()))).unwrap(),
            size: 0,
            modified: None,
        };
        assert!(matches!(
            judge(&[mine.clone(), odd]),
            Verdict::First | Verdict::Behind
        ));
    }
}
