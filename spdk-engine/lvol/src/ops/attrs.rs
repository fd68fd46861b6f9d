//! Names, attributes and the read-only mark.

use crate::{blob::Blob, error::Error, store::Inner, types::BlobId};
use blobstore_format::{descriptor::Flags, lvs};
use std::rc::Rc;

impl Inner {
    fn check_writable(&self, blob: &Blob) -> Result<(), Error> {
        if blob.md_read_only() {
            return Err(Error::NotPermitted(format!("{:?} is read-only", blob.name())));
        }
        Ok(())
    }

    pub(crate) async fn rename(&self, blob: &Rc<Blob>, name: &str) -> Result<(), Error> {
        let old = blob.name();
        if old == name {
            return Ok(());
        }
        let value = lvs::short_name(name).map_err(|e| Error::Invalid(e.to_string()))?;
        if self.state.borrow().names.contains_key(name) {
            return Err(Error::Exists(name.to_owned()));
        }
        self.check_writable(blob)?;
        let _operation = self.begin(&[blob])?;
        self.state.borrow_mut().names.insert(name.to_owned(), BlobId::INVALID);
        let result = self.commit_md(blob, |md| md.set_xattr(lvs::NAME, value)).await;
        let mut state = self.state.borrow_mut();
        if let Err(error) = result {
            state.names.remove(name);
            return Err(error);
        }
        if state.names.get(&old) == Some(&blob.id) {
            state.names.remove(&old);
        }
        state.names.insert(name.to_owned(), blob.id);
        blob.state.borrow_mut().name = name.to_owned();
        Ok(())
    }

    pub(crate) async fn set_read_only(&self, blob: &Rc<Blob>) -> Result<(), Error> {
        let _operation = self.begin(&[blob])?;
        if blob.data_read_only() {
            return Ok(());
        }
        // Writes in flight end first: after this none changes the content.
        let _quiet = self.quiet(blob).await;
        self.commit_md(blob, |md| md.flags.data_ro |= Flags::READ_ONLY).await
    }

    /// Sets (`Some`) or removes a user attribute.
    pub(crate) async fn change_xattr(&self, blob: &Rc<Blob>, name: &str, value: Option<&[u8]>) -> Result<(), Error> {
        if name.is_empty() || [lvs::NAME, lvs::UUID].contains(&name) {
            return Err(Error::Invalid(format!("the attribute {name:?} is not to be changed")));
        }
        self.check_writable(blob)?;
        let _operation = self.begin(&[blob])?;
        if value.is_none() && blob.state.borrow().md.xattr(name).is_none() {
            return Err(Error::NotFound(format!("the attribute {name:?}")));
        }
        self.commit_md(blob, |md| match value {
            Some(value) => md.set_xattr(name, value),
            None => {
                md.remove_xattr(name);
            }
        })
        .await
    }
}
