//! Manifests, tags and referrers.

use reqwest::Method;
use reqwest::header::{ACCEPT, CONTENT_TYPE};

use super::auth::Intent;
use super::document::{
    DOCKER_INDEX, DOCKER_MANIFEST, Descriptor, INDEX, Index, MANIFEST, Manifest, Tags,
};
use super::transport::{Answer, Body, Call};
use super::{MAX_MANIFEST, ManifestName, Registry, Sha256, is_tag};
use crate::error::{Result, StoreError};

/// Largest page of tags in bytes, and most of them.
const MAX_PAGE: u64 = 16 << 20;
const MAX_PAGES: usize = 10_000;
/// Most tags of a repository that are listed.
const MAX_TAGS: usize = 4_000_000;
/// Tags asked for at once.
const PAGE: usize = 1000;

/// A manifest as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Their digest.
    pub digest: Sha256,
    /// What the registry says they are.
    pub media_type: String,
}

/// What deleting did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deleted {
    /// It is gone.
    Deleted,
    /// There was none.
    Absent,
}

impl Registry {
    /// A manifest or index; `None` if there is none.
    ///
    /// # Errors
    /// [`StoreError::Corrupt`] if its bytes do not have the digest by which it was asked for or
    /// that the registry states; [`StoreError::TooLarge`] beyond [`MAX_MANIFEST`]; else what went
    /// wrong in reading.
    pub fn manifest(&self, name: &ManifestName) -> Result<Option<Fetched>> {
        let transport = &self.transport;
        let what = format!("manifest {name}");
        transport.persist(&what, || {
            let mut answer = transport.attempt_accepting(&self.manifest_call(
                Method::GET,
                name,
                &what,
                &[200, 404],
            )?)?;
            if answer.status() == 404 {
                return Ok(None);
            }
            let bytes = answer
                .body(MAX_MANIFEST)
                .map_err(|e| transport.io("read", &what, e))?
                .ok_or_else(|| StoreError::TooLarge {
                    store: transport.address().to_owned(),
                    key: what.clone(),
                    size: answer.content_length().unwrap_or(MAX_MANIFEST + 1),
                    limit: MAX_MANIFEST,
                })?;
            let digest = Sha256::of(&bytes);
            let stated = match name {
                ManifestName::Digest(digest) => Some(*digest),
                ManifestName::Tag(_) => stated_digest(&answer),
            };
            if stated.is_some_and(|stated| stated != digest) {
                let stated = stated.map(|d| d.to_string()).unwrap_or_default();
                return Err(transport.corrupt(
                    &what,
                    format!("its bytes have the digest {digest}, not {stated}"),
                ));
            }
            let media_type = answer.header("content-type").unwrap_or_default();
            let media_type = media_type.split(';').next().unwrap_or_default().trim();
            Ok(Some(Fetched {
                media_type: media_type.to_owned(),
                bytes,
                digest,
            }))
        })
    }

    /// The digest of a manifest; `None` if there is none. Cheaper than reading it, and not checked.
    ///
    /// # Errors
    /// What went wrong in asking.
    pub fn manifest_digest(&self, name: &ManifestName) -> Result<Option<Sha256>> {
        let what = format!("manifest {name}");
        let answer =
            self.transport
                .send(&self.manifest_call(Method::HEAD, name, &what, &[200, 404])?)?;
        if answer.status() == 404 {
            return Ok(None);
        }
        match stated_digest(&answer) {
            Some(digest) => Ok(Some(digest)),
            // Not every registry states it.
            None => Ok(self.manifest(name)?.map(|fetched| fetched.digest)),
        }
    }

    fn manifest_call<'a>(
        &self,
        method: Method,
        name: &ManifestName,
        what: &'a str,
        accept: &'a [u16],
    ) -> Result<Call<'a>> {
        Ok(Call {
            method,
            url: self.transport.url(&format!("manifests/{name}"))?,
            headers: vec![(
                ACCEPT,
                [MANIFEST, INDEX, DOCKER_MANIFEST, DOCKER_INDEX].join(", "),
            )],
            body: Body::Empty,
            intent: Intent::Pull,
            accept,
            operation: "read",
            what,
        })
    }

    /// Writes a manifest, whose blobs are there. A tag means it from then on; by digest it has to
    /// be that of the bytes.
    ///
    /// # Errors
    /// What went wrong: it may have been written nevertheless.
    pub fn put_manifest(
        &self,
        name: &ManifestName,
        media_type: &str,
        bytes: &[u8],
    ) -> Result<Sha256> {
        Ok(self.put(name, media_type, bytes)?.0)
    }

    /// The digest, and whether the registry says that it knows the manifest's subject.
    fn put(&self, name: &ManifestName, media_type: &str, bytes: &[u8]) -> Result<(Sha256, bool)> {
        let transport = &self.transport;
        let what = format!("manifest {name}");
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(StoreError::TooLarge {
                store: transport.address().to_owned(),
                key: what,
                size: bytes.len() as u64,
                limit: MAX_MANIFEST,
            });
        }
        let answer = transport.send(&Call {
            method: Method::PUT,
            url: transport.url(&format!("manifests/{name}"))?,
            headers: vec![(CONTENT_TYPE, media_type.to_owned())],
            body: Body::Bytes(bytes.to_vec().into()),
            intent: Intent::Push,
            accept: &[200, 201, 202, 204],
            operation: "write",
            what: &what,
        })?;
        let digest = Sha256::of(bytes);
        if let Some(stated) = stated_digest(&answer).filter(|stated| *stated != digest) {
            return Err(transport.corrupt(
                &what,
                format!("the registry took it for {stated}, it is {digest}"),
            ));
        }
        Ok((digest, answer.header("oci-subject").is_some()))
    }

    /// Deletes the manifest with this digest, and with it all tags that mean it.
    ///
    /// # Errors
    /// [`StoreError::Denied`] if the registry does not allow it.
    pub fn delete_manifest(&self, digest: &Sha256) -> Result<Deleted> {
        let what = format!("manifest {digest}");
        let answer = self.transport.send(&Call {
            method: Method::DELETE,
            url: self.transport.url(&format!("manifests/{digest}"))?,
            headers: Vec::new(),
            body: Body::Empty,
            intent: Intent::Delete,
            accept: &[200, 202, 204, 404],
            operation: "delete",
            what: &what,
        })?;
        Ok(if answer.status() == 404 {
            Deleted::Absent
        } else {
            Deleted::Deleted
        })
    }

    /// All tags of the repository, sorted; none if it does not exist.
    ///
    /// # Errors
    /// What went wrong in reading.
    pub fn tags(&self) -> Result<Vec<String>> {
        let transport = &self.transport;
        let what = "the list of tags";
        let mut url = transport.url("tags/list")?;
        url.query_pairs_mut().append_pair("n", &PAGE.to_string());
        let mut tags = Vec::new();
        for _ in 0..MAX_PAGES {
            let (page, next) = transport.persist(what, || {
                let mut answer = transport.attempt_accepting(&Call {
                    method: Method::GET,
                    url: url.clone(),
                    headers: Vec::new(),
                    body: Body::Empty,
                    intent: Intent::Pull,
                    accept: &[200, 404],
                    operation: "list",
                    what,
                })?;
                if answer.status() == 404 {
                    return Ok((Vec::new(), None));
                }
                let body = answer
                    .body(MAX_PAGE)
                    .map_err(|e| transport.io("list", what, e))?
                    .ok_or_else(|| {
                        transport
                            .corrupt(what, format!("a page of it has more than {MAX_PAGE} bytes"))
                    })?;
                let page: Tags = serde_json::from_slice(&body)
                    .map_err(|e| transport.corrupt(what, e.to_string()))?;
                let next = match answer.header("link").and_then(next_page) {
                    None => None,
                    Some(next) => Some(transport.resolve(&answer.url, next)?),
                };
                Ok((page.tags.unwrap_or_default(), next))
            })?;
            tags.extend(page.into_iter().filter(|tag| is_tag(tag)));
            if tags.len() > MAX_TAGS {
                return Err(transport.corrupt(what, format!("it has more than {MAX_TAGS} tags")));
            }
            match next {
                Some(next) if next != url => url = next,
                _ => {
                    tags.sort();
                    tags.dedup();
                    return Ok(tags);
                }
            }
        }
        Err(transport.corrupt(what, format!("it has more than {MAX_PAGES} pages")))
    }

    /// Writes a manifest with a subject, by its digest, so that [`Registry::referrers`] of the
    /// subject finds it. A registry that does not know subjects gets the list of them as a
    /// manifest with a tag (distribution specification, "Referrers Tag Schema"); of two processes
    /// that add to one such list at once, one may be lost.
    ///
    /// # Errors
    /// What went wrong; the manifest itself may have been written.
    pub fn put_referrer(&self, name: &ManifestName, manifest: &Manifest) -> Result<Sha256> {
        let bytes = serde_json::to_vec(manifest).map_err(|e| StoreError::InvalidInput {
            object: format!("manifest {name}"),
            what: e.to_string(),
        })?;
        let (digest, knows) = self.put(name, MANIFEST, &bytes)?;
        let Some(subject) = manifest.subject.as_ref().filter(|_| !knows) else {
            return Ok(digest);
        };
        let tag = fallback_tag(&subject.digest);
        let mut list = self.fallback(&tag)?;
        if list.iter().any(|entry| entry.digest == digest) {
            return Ok(digest);
        }
        let mut entry = Descriptor::new(MANIFEST, digest, bytes.len() as u64);
        entry.artifact_type.clone_from(&manifest.artifact_type);
        entry.annotations.clone_from(&manifest.annotations);
        list.push(entry);
        let index =
            serde_json::to_vec(&Index::new(list)).map_err(|e| StoreError::InvalidInput {
                object: format!("manifest {tag}"),
                what: e.to_string(),
            })?;
        self.put_manifest(&ManifestName::Tag(tag), INDEX, &index)?;
        Ok(digest)
    }

    /// The manifests whose subject is the one with this digest, those of one kind if it is given.
    ///
    /// # Errors
    /// What went wrong in reading.
    pub fn referrers(
        &self,
        subject: &Sha256,
        artifact_type: Option<&str>,
    ) -> Result<Vec<Descriptor>> {
        let transport = &self.transport;
        let what = format!("referrers of {subject}");
        let found = transport.persist(&what, || {
            let mut answer = transport.attempt_accepting(&Call {
                method: Method::GET,
                url: transport.url(&format!("referrers/{subject}"))?,
                headers: vec![(ACCEPT, INDEX.to_owned())],
                body: Body::Empty,
                intent: Intent::Pull,
                accept: &[200, 400, 404, 405],
                operation: "list",
                what: &what,
            })?;
            if answer.status() != 200 {
                return Ok(None);
            }
            let body = answer
                .body(MAX_MANIFEST)
                .map_err(|e| transport.io("list", &what, e))?
                .ok_or_else(|| {
                    transport.corrupt(
                        &what,
                        format!("the list has more than {MAX_MANIFEST} bytes"),
                    )
                })?;
            let index: Index = serde_json::from_slice(&body)
                .map_err(|e| transport.corrupt(&what, e.to_string()))?;
            Ok(Some(index.manifests))
        })?;
        let mut found = match found {
            Some(found) => found,
            None => self.fallback(&fallback_tag(subject))?,
        };
        found.retain(|entry| {
            artifact_type.is_none_or(|wanted| entry.artifact_type.as_deref() == Some(wanted))
        });
        Ok(found)
    }

    /// The list of referrers that a tag means.
    fn fallback(&self, tag: &str) -> Result<Vec<Descriptor>> {
        let Some(fetched) = self.manifest(&ManifestName::Tag(tag.to_owned()))? else {
            return Ok(Vec::new());
        };
        let index: Index = serde_json::from_slice(&fetched.bytes).map_err(|e| {
            self.transport
                .corrupt(&format!("manifest {tag}"), e.to_string())
        })?;
        Ok(index.manifests)
    }
}

/// The tag of the list of a manifest's referrers.
fn fallback_tag(subject: &Sha256) -> String {
    subject.to_string().replace(':', "-")
}

/// The digest that the registry says an answer has, if it is one that we know.
pub(super) fn stated_digest(answer: &Answer) -> Option<Sha256> {
    answer.header("docker-content-digest")?.parse().ok()
}

/// The address of the next page in a `Link` header (RFC 8288).
fn next_page(link: &str) -> Option<&str> {
    link.split(',').find_map(|part| {
        let (address, parameters) = part.trim().strip_prefix('<')?.split_once('>')?;
        parameters
            .split(';')
            .any(|parameter| matches!(parameter.trim(), "rel=\"next\"" | "rel=next"))
            .then_some(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_name_the_next() {
        for (link, next) in [
            (
                "</v2/a/tags/list?last=b&n=1>; rel=\"next\"",
                Some("/v2/a/tags/list?last=b&n=1"),
            ),
            ("<x>; rel=prev, <y>; rel=next", Some("y")),
            ("<x>", None),
            ("x; rel=next", None),
            ("<x; rel=next", None),
            ("", None),
        ] {
            assert_eq!(next_page(link), next, "{link}");
        }
    }
}
