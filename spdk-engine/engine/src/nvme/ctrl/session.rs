//! Making and ending a session: admin queue, namespaces, and a queue on every core that wants one.

use std::rc::{Rc, Weak};

use futures::future::join_all;
use nvme_wire::features::AsyncEvent;

use super::{Ctrl, Seat, State};
use crate::nvme::host::controller::connect_socket;
use crate::nvme::host::{Controller, ControllerEvents, HostError, Loss};
use crate::nvme::queue::{self, Down};
use crate::reactor::driver::{NANOS_PER_S, Nanos};
use crate::reactor::{Core, CoreId};

/// After how long a core that has not closed its connection is complained of.
const CLOSE_NS: Nanos = 5 * NANOS_PER_S;

impl Ctrl {
    /// Makes a new session and puts it to use.
    pub(super) async fn bring_up(self: &Rc<Self>) -> Result<(), HostError> {
        let session = self.session.get() + 1;
        self.session.set(session);
        let made = self.make_session(session).await;
        if made.is_err() {
            let why = if self.failing.get() { Down::Failed } else { Down::Reconnecting };
            self.end_session(why).await;
        }
        made
    }

    async fn make_session(self: &Rc<Self>, session: u64) -> Result<(), HostError> {
        let core = self.core().clone();
        let net = Rc::clone(self.app.net());
        let controller = Controller::connect(&core, &*net, self.params.clone()).await?;
        *self.controller.borrow_mut() = Some(Rc::clone(&controller));
        self.check(session)?;
        self.shared.learn(&controller, &self.trid);
        controller.watch(&core, Rc::new(SessionEvents { ctrl: Rc::downgrade(self), session }));
        self.scan(&controller).await?;
        self.open_seats(session, &controller).await?;
        self.check(session)?;
        self.failing.set(false);
        self.restored.set(session);
        self.state.set(State::Enabled);
        Ok(())
    }

    /// Whether the session is still worth going on with.
    fn check(&self, session: u64) -> Result<(), HostError> {
        if self.is_deleting() || self.session.get() != session || self.broken.get() == session {
            return Err(HostError::Lost { what: "new session", loss: Loss::Closed });
        }
        Ok(())
    }

    /// Connects every core's queue that is not; more may come while it does.
    pub(super) async fn open_seats(
        self: &Rc<Self>,
        session: u64,
        controller: &Rc<Controller>,
    ) -> Result<(), HostError> {
        loop {
            let wanting = self.assign(controller);
            if wanting.is_empty() {
                return Ok(());
            }
            let core = self.core().clone();
            let mut opening = Vec::new();
            for (seat, instance, qid) in wanting {
                let stream = connect_socket(&**self.app.net(), &self.params)?;
                let (id, spec) = (self.shared.id, controller.queue(qid));
                opening.push(
                    core.call_async(seat, move |core| {
                        queue::connect(core.clone(), id, instance, session, stream, spec)
                    }),
                );
            }
            for outcome in join_all(opening).await {
                outcome.unwrap_or(Err(HostError::Lost { what: "I/O queue", loss: Loss::Closed }))?;
            }
            self.check(session)?;
        }
    }

    /// Gives a queue identifier to every seat without one; a seat for which there is none fails its I/O.
    fn assign(&self, controller: &Controller) -> Vec<(CoreId, u64, u16)> {
        let mut seats = self.seats.borrow_mut();
        let mut given = Vec::new();
        for index in 0..seats.len() {
            if seats[index].qid.is_some() {
                continue;
            }
            let most = controller.io_queues().min(0xFFFE) as u16;
            let Some(qid) = self.free_qid(&seats, most) else {
                tracing::error!(controller = self.shared.name, most, "no I/O queue left for another core");
                self.post_down(&seats[index], Down::Failed);
                continue;
            };
            seats[index].qid = Some(qid);
            given.push((seats[index].core, seats[index].instance, qid));
        }
        given
    }

    /// In turn: the controller may not have noticed yet that an identifier given back just now is free.
    fn free_qid(&self, seats: &[Seat], most: u16) -> Option<u16> {
        let last = self.last_qid.get().min(most);
        let used = |qid: &u16| seats.iter().any(|s| s.qid == Some(*qid));
        let qid = (last + 1..=most).chain(1..=last).find(|qid| !used(qid))?;
        self.last_qid.set(qid);
        Some(qid)
    }

    pub(super) fn post_down(&self, seat: &Seat, why: Down) {
        let (id, instance) = (self.shared.id, seat.instance);
        self.core().post(seat.core, move |core| queue::down(core, id, instance, why));
    }

    pub(super) fn post_all(&self, why: Down) {
        self.failing.set(self.failing.get() || why == Down::Failed);
        self.seats.borrow().iter().for_each(|seat| self.post_down(seat, why));
    }

    /// Closes every connection of the session; done when every core has said so.
    pub(super) async fn end_session(&self, why: Down) {
        let core = self.core().clone();
        let mut closing = Vec::new();
        for seat in self.seats.borrow_mut().iter_mut() {
            seat.qid = None;
            let (id, instance) = (self.shared.id, seat.instance);
            closing.push(core.call(seat.core, move |core| queue::down(core, id, instance, why)));
        }
        let controller = self.controller.borrow_mut().take();
        if let Some(controller) = controller {
            controller.close(&core);
        }
        let mut closed = join_all(closing);
        // There is no going on before: what is still open could write behind the back of the next session.
        while core.timeout(CLOSE_NS, &mut closed).await.is_none() {
            tracing::error!(controller = self.shared.name, "a core does not close its connection");
        }
    }
}

struct SessionEvents {
    ctrl: Weak<Ctrl>,
    session: u64,
}

impl ControllerEvents for SessionEvents {
    fn event(self: Rc<Self>, core: &Core, event: AsyncEvent) {
        let Some(ctrl) = self.ctrl.upgrade() else { return };
        tracing::debug!(controller = ctrl.shared.name, ?event, "event");
        if matches!(event, AsyncEvent::NamespaceAttribute | AsyncEvent::AnaChange) {
            core.spawn(async move { ctrl.scan_after_event().await });
        }
    }

    fn lost(self: Rc<Self>, _core: &Core, loss: &Loss) {
        if let Some(ctrl) = self.ctrl.upgrade() {
            ctrl.session_lost(self.session, &loss.to_string());
        }
    }
}
