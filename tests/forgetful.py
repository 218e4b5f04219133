"""A test case of a project that forgets a hold, run by ``manage.py test``."""

from django.test import TransactionTestCase

from dlocks import db_lock


class ForgetfulTests(TransactionTestCase):
    def test_a_hold_is_forgotten(self):
        db_lock("report", ttl=3).acquire()
        self.assertTrue(db_lock("report").locked())
