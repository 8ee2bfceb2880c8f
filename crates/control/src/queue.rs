use crate::locked;
use crate::message::Frame;
use std::collections::VecDeque;
use std::sync::Mutex;
use tokio::sync::Notify;

/// What waits to be written to a connection. Any thread adds to it and never waits; it has no bound, so that no rank waits for another that
/// does not read.
pub struct Queue<M> {
    waiting: Mutex<Waiting<M>>,
    /// One task reads.
    ready: Notify,
}

struct Waiting<M> {
    urgent: VecDeque<Frame<M>>,
    ordered: VecDeque<Frame<M>>,
    is_closed: bool,
}

impl<M> Queue<M> {
    /// Without anything.
    pub fn new() -> Self {
        let waiting = Waiting { urgent: VecDeque::new(), ordered: VecDeque::new(), is_closed: false };
        Self { waiting: Mutex::new(waiting), ready: Notify::new() }
    }

    /// After all that was added so.
    pub fn push(&self, frame: impl Into<Frame<M>>) {
        self.change(|waiting| waiting.ordered.push_back(frame.into()));
    }

    /// The same for several, which stay together.
    pub fn extend(&self, frames: impl Iterator<Item = Frame<M>>) {
        self.change(|waiting| waiting.ordered.extend(frames));
    }

    /// Before all that was added otherwise.
    pub fn push_urgent(&self, message: M) {
        self.change(|waiting| waiting.urgent.push_back(message.into()));
    }

    /// A last message, in place of what waits in order.
    pub fn finish(&self, message: M) {
        self.change(|waiting| {
            waiting.ordered.clear();
            waiting.urgent.push_back(message.into());
            waiting.is_closed = true;
        });
    }

    /// A message in place of what waits in order.
    pub fn interrupt(&self, message: M) {
        self.change(|waiting| {
            waiting.ordered.clear();
            waiting.urgent.push_back(message.into());
        });
    }

    /// The next frame, as soon as there is one; none once the queue is closed and empty. May be dropped while it waits.
    pub async fn next(&self) -> Option<Frame<M>> {
        loop {
            if let Some(next) = self.take() {
                return next;
            }
            self.ready.notified().await;
        }
    }

    /// The next frame, or that there will be none; `None` where one has to wait for it.
    pub fn take(&self) -> Option<Option<Frame<M>>> {
        let mut waiting = locked(&self.waiting);
        let next = waiting.urgent.pop_front().or_else(|| waiting.ordered.pop_front());
        match next {
            None if !waiting.is_closed => None,
            next => Some(next),
        }
    }

    fn change(&self, change: impl FnOnce(&mut Waiting<M>)) {
        let mut waiting = locked(&self.waiting);
        if !waiting.is_closed {
            change(&mut waiting);
        }
        drop(waiting);
        self.ready.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(queue: &Queue<u8>) -> Vec<u8> {
        std::iter::from_fn(|| queue.take().flatten()).map(|frame| frame.message).collect()
    }

    #[test]
    fn what_is_urgent_comes_first_and_a_closed_queue_takes_nothing() {
        let queue = Queue::new();
        queue.push(1);
        queue.push_urgent(2);
        queue.push(3);
        assert_eq!(drained(&queue), [2, 1, 3]);
        assert!(queue.take().is_none());
        queue.push(4);
        queue.interrupt(5);
        queue.push(6);
        assert_eq!(drained(&queue), [5, 6]);
        queue.push(7);
        queue.finish(8);
        queue.push(9);
        assert_eq!(drained(&queue), [8]);
        assert!(matches!(queue.take(), Some(None)));
    }
}
